"""Holds the limits of a server: sizes, numbers, times, and who may connect."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.server.access_log import FORMS, Form
from hybridmem.chat.server.keys import Key, Keys, check_key
from hybridmem.memory import SpecError
from hybridmem.memory.blocks.arguments import read_count

MOST_CHOICES = 16
"""Replies that one request may ask for: its prompts times `n`."""

_HOST = re.compile(r"[^\s/:@,]+|\[[0-9a-fA-F:.]+\]")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/,]+|null")


@dataclass(frozen=True)
class ServerOptions:
    """Holds the limits of a server.

    Attributes:
        api_key: what clients must send as `Authorization: Bearer KEY`; None: nothing.
        keys: of several clients, with limits of their own, as `Key` or as tables of the configuration file.
        access_log: a line for each request on the standard error: "off", "text" or "json".
        ssl_certfile, ssl_keyfile: PEM files of the certificate, with those that sign it behind it, and of its key.
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
        pooling: how texts are embedded, "last" or "mean"; None: requests must say it.
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
    keys: tuple[Key, ...] = ()
    access_log: Form = "off"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    parse_special: bool = False
    max_body_bytes: int = 1 << 20
    max_tokens: int | None = None
    default_tokens: int = 1024
    max_requests: int = 256
    max_connections: int = 768
    max_peer_connections: int = 384
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    body_bytes_per_second: int = 1024
    stall_seconds: float = 60.0
    grace_seconds: float = 10.0
    pooling: Literal["last", "mean"] | None = None
    sampling: Sampling | None = None
    save: Callable[[], None] | None = None
    save_seconds: float | None = None
    sessions: str | None = None
    session_bytes: int = 1 << 30
    session_days: float = 30.0

    def __post_init__(self) -> None:
        if self.api_key is not None:
            check_key(self.api_key, "the API key")
        object.__setattr__(self, "keys", tuple(map(Key.read, self.keys)))
        Keys(self.all_keys)
        if self.access_log not in FORMS:
            raise SpecError(f"access_log={self.access_log!r}; give one of {', '.join(FORMS)}")
        check_certificate(self.ssl_certfile, self.ssl_keyfile)
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

    @property
    def all_keys(self) -> tuple[Key, ...]:
        """Return all keys that clients may send; none: they need none."""
        own = () if self.api_key is None else (Key("api-key", self.api_key),)
        return (*own, *self.keys)


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raise SpecError for files of a certificate that TLS cannot use."""
    if certfile is None and keyfile is None:
        return
    if certfile is None or keyfile is None:
        raise SpecError("TLS needs both --ssl-certfile and --ssl-keyfile")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise SpecError(f"the certificate {certfile} with the key {keyfile} cannot be used: {error}") from None
