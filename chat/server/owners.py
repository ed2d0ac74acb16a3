"""Says whose cached prefixes and whose stored sessions a request may use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hybridmem.chat.server.options import ServerOptions

Header = Callable[[str], str | None]
"""Returns the value of a header by its name, or None."""


SESSION_HEADER = "x-session-id"
SESSION_HEADERS = (SESSION_HEADER, "x-claude-code-session-id", "thread-id", "session-id")
"""Headers that name a session: our own, that of Claude Code, and those of Codex."""


class Sharing(Protocol):
    """Declares the fields of a request that say with whom it shares prefixes."""

    @property
    def cache_salt(self) -> str | None: ...
    @property
    def prompt_cache_key(self) -> str | None: ...
    @property
    def user(self) -> str | None: ...


@dataclass(frozen=True)
class Owners:
    """Finds the owners of prefixes and of sessions.

    `cached_tokens`, and how soon a reply begins, tell a client whether somebody has sent the same prompt before. So
    prefixes are shared by requests with one API key and one `cache_salt` alone. `prompt_cache_key` and `user` name
    requests that are alike. They are no walls, unless `isolates` makes them walls.

    Attributes:
        has_keys: whether the server asks for keys. Without them, everybody on the server shares.
    """

    has_keys: bool
    isolates: bool = False

    @staticmethod
    def of(options: ServerOptions) -> Owners:
        return Owners(bool(options.all_keys), options.isolate)

    def of_prefixes(self, header: Header, asked: Sharing) -> bytes:
        """Return the owner of the prefixes that a request reuses and leaves."""
        key = credential_of(header) if self.has_keys or self.isolates else None
        hints = (asked.prompt_cache_key, asked.user) if self.isolates else ()
        return _digest(key, asked.cache_salt, *hints)

    def of_sessions(self, header: Header, cache_key: str | None, identifier: str | None) -> bytes:
        """Return the owner of the sessions that a request stores and reads. Both names are walls here."""
        key = credential_of(header) if self.has_keys or self.isolates else None
        return _digest(key, cache_key, *(() if identifier is None else (identifier,)))


def session_named(header: Header) -> str | None:
    """Return the session that a header names, or None."""
    return next((given for name in SESSION_HEADERS if (given := header(name))), None)


def credential_of(header: Header) -> str | None:
    """Return the key that a client shows. It is the same in either header."""
    authorization, key = header("authorization"), header("x-api-key")
    return f"Bearer {key}" if not authorization and key else authorization


def _digest(*parts: str | None) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()
