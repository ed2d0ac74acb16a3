"""Holds the limits of a server: sizes, numbers, times, and who may connect."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from chat.decoding.sampling import Sampling
from memory import SpecError
from memory.blocks.arguments import read_count

MOST_CHOICES = 16
"""Replies that one request may ask for: its prompts times `n`."""

_HOST = re.compile(r"[^\s/:@,]+|\[[0-9a-fA-F:.]+\]")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/,]+|null")


@dataclass(frozen=True)
class ServerOptions:
    """Holds the limits of a server.

    Attributes:
        api_key: what clients must send as `Authorization: Bearer KEY`; None: nothing.
        allowed_hosts: names that a request's Host may have beside those of loopback, without port. None given: any with
            a key.
        allowed_origins: of web pages that may send requests and read the responses, such as "https://example.com"; "*":
            all. None given: any may send requests with a key, and none may read the responses.
        parse_special: special tokens may be written in messages, so that clients can write turns. In prompts of
            /v1/completions they always may.
        max_body_bytes: of a request's body.
        max_tokens: of a prompt and its reply together; None: what the model's config and the memory's budget allow.
        default_tokens: of a chat's reply, where the request names no number.
        max_requests: that are answered at once; the next is told to come back later.
        max_connections: open at once. When one more comes, the one that waits longest for its client's bytes is closed.
        max_peer_connections: of those, from one address.
        head_seconds: in which a request's head must have arrived.
        body_seconds: in which a body must have arrived.
        body_bytes_per_second: that a body must bring on average, not counting its first 5 seconds.
        stall_seconds: after which a client that takes no more bytes counts as gone.
        grace_seconds: that replies may still take when the server is to stop.
        sampling: what a request leaves out; None: what the checkpoint's generation_config.json names, and else a
            temperature of 1.
        save: saves what is worth keeping; called when the engine has stopped.
        save_seconds: after which `save` is called again and again while the server runs; None: only then.
        sessions: the folder that keeps stored sessions across restarts; None: they end with the server.
        session_bytes: of the texts and token ids of all sessions; beyond, those used longest ago are deleted.
        session_days: after which a session that nobody has used is deleted. Sessions with a pinned node stay.
    Raises:
        SpecError: naming the option and its value.
    """

    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    parse_special: bool = False
    max_body_bytes: int = 1 << 20
    max_tokens: int | None = None
    default_tokens: int = 1024
    max_requests: int = 64
    max_connections: int = 768
    max_peer_connections: int = 384
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    body_bytes_per_second: int = 1024
    stall_seconds: float = 60.0
    grace_seconds: float = 10.0
    sampling: Sampling | None = None
    save: Callable[[], None] | None = None
    save_seconds: float | None = None
    sessions: str | None = None
    session_bytes: int = 1 << 30
    session_days: float = 30.0

    def __post_init__(self) -> None:
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise SpecError("the API key is empty or has spaces around it; give one without, or none")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise SpecError(f"allowed host {host!r}; give a name without scheme and port, such as example.com")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise SpecError(f"allowed origin {origin!r}; give scheme and name, such as https://example.com, or *")
        least = {
            "max_body_bytes": 1,
            "max_tokens": 2,
            "default_tokens": 1,
            "max_requests": 1,
            "max_connections": 1,
            "max_peer_connections": 1,
            "body_bytes_per_second": 1,
            "session_bytes": 1,
        }
        for name, n in least.items():
            value = getattr(self, name)
            if value is None and name == "max_tokens":
                continue
            read_count(name, value, n)
        for name in ("head_seconds", "body_seconds", "stall_seconds", "grace_seconds"):
            if not getattr(self, name) >= 0:
                raise SpecError(f"{name}={getattr(self, name)!r}; give seconds, 0 or more")
        if not self.session_days > 0:
            raise SpecError(f"session_days={self.session_days!r}; give days above 0")
        if self.save_seconds is not None and not self.save_seconds > 0:
            raise SpecError(f"save_seconds={self.save_seconds!r}; give seconds above 0, or None")
