"""Says whose cached prefixes and whose stored sessions a request may use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hybridmem.chat.server.keys import hash_key
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
    requests share prefixes only if they have the same API key and the same `cache_salt`. `prompt_cache_key` and `user`
    are hints about requests that are alike. They separate prefixes only if `isolates` is set.

    Attributes:
        has_keys: whether the server asks for keys. Without keys, all clients of the server share prefixes.
        keys: the hashes of these keys.
    """

    has_keys: bool
    isolates: bool = False
    keys: tuple[bytes, ...] = ()

    @staticmethod
    def of(options: ServerOptions) -> Owners:
        keys = tuple(key.hash for key in options.all_keys)
        return Owners(bool(keys), options.isolate, keys)

    def of_everybody(self, cache_salt: str | None) -> list[bytes]:
        """Return all owners of prefixes that requests with this salt can have: one for each key, or one for all.

        If hints separate prefixes, their owners are unknown until such requests come.
        """
        hints = (None, None) if self.isolates else ()
        return [_digest(key, cache_salt, *hints) for key in (map(bytes.hex, self.keys) if self.keys else [None])]

    def of_prefixes(self, header: Header, asked: Sharing) -> bytes:
        """Return the owner of the prefixes that a request reuses and keeps."""
        shown = credential_of(header) if self.has_keys or self.isolates else None
        key = None if shown is None else hash_key(shown.removeprefix("Bearer ").encode()).hex()
        hints = (asked.prompt_cache_key, asked.user) if self.isolates else ()
        return _digest(key, asked.cache_salt, *hints)

    def of_sessions(self, header: Header, cache_key: str | None, identifier: str | None) -> bytes:
        """Return the owner of the sessions that a request stores and reads.

        Requests with different names have different owners.
        """
        key = credential_of(header) if self.has_keys or self.isolates else None
        return _digest(key, cache_key, *(() if identifier is None else (identifier,)))


def session_named(header: Header) -> str | None:
    """Return the session that a header names, or None."""
    return next((given for name in SESSION_HEADERS if (given := header(name))), None)


def credential_of(header: Header) -> str | None:
    """Return the key with which a client identifies itself, in whichever header it comes.

    Access is decided by the same key.
    """
    authorization = header("authorization")
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        key = header("x-api-key") or ""
    return f"Bearer {key.strip()}" if key.strip() else authorization


def _digest(*parts: str | None) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()
