"""What a server allows: how large, how many, how long, and to whom."""

from __future__ import annotations

from dataclasses import dataclass

from memory import SpecError

MOST_CHOICES = 16
"""Replies that one request may ask for: its prompts times `n`."""


@dataclass(frozen=True)
class ServerOptions:
    """The limits of a server.

    Attributes:
        api_key: what clients must send as `Authorization: Bearer KEY`; None: nothing.
        parse_special: special tokens may be written in messages, so that clients can write turns. In prompts of /v1/completions they
            always may.
        max_body_bytes: of a request's body.
        max_tokens: of a prompt and its reply together; None: what the model's config and the memory's budget allow.
        default_tokens: of a chat's reply, where the request names no number.
        max_requests: that are answered at once; the next is told to come back later.
        body_seconds: in which a body must have arrived.
        stall_seconds: after which a client that takes no more bytes counts as gone.
        grace_seconds: that replies may still take when the server is to stop.
    Raises:
        SpecError: naming the option and its value.
    """

    api_key: str | None = None
    parse_special: bool = False
    max_body_bytes: int = 1 << 20
    max_tokens: int | None = None
    default_tokens: int = 1024
    max_requests: int = 64
    body_seconds: float = 30.0
    stall_seconds: float = 60.0
    grace_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise SpecError("the API key is empty or has spaces around it; give one without, or none")
        least = {"max_body_bytes": 1, "max_tokens": 2, "default_tokens": 1, "max_requests": 1}
        for name, n in least.items():
            value = getattr(self, name)
            if value is None and name == "max_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < n:
                raise SpecError(f"{name}={value!r}; it must be an integer of at least {n}")
        for name in ("body_seconds", "stall_seconds", "grace_seconds"):
            if not getattr(self, name) >= 0:
                raise SpecError(f"{name}={getattr(self, name)!r}; give seconds, 0 or more")
