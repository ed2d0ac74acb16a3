"""Holds the keys of clients and their limits: a number of requests at once, and a number of tokens per minute."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from hybridmem.chat.server.errors import too_many
from hybridmem.memory import SpecError
from hybridmem.memory.blocks import is_integer

_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Key:
    """Holds a key that clients may send, and its limits.

    Attributes:
        name: the name of the key in the access log.
        key: the key as clients send it. `key_sha256` may replace it: the key's SHA-256 in hexadecimal, so that the file
            holds no key.
        max_requests: how many requests are answered at once. None: as many as the server allows.
        tokens_per_minute: the most tokens per minute, of prompts and replies together. None: any number.
    Raises:
        SpecError: a wrong value. The message names the field and the value, never the key.
    """

    name: str
    key: str | None = field(default=None, repr=False)
    key_sha256: str | None = field(default=None, repr=False)
    max_requests: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise SpecError(f"a key has name={self.name!r}; give each a name, for the log")
        if (self.key is None) == (self.key_sha256 is None):
            raise SpecError(f"key {self.name!r} needs either key or key_sha256")
        if self.key is not None:
            check_key(self.key, f"key {self.name!r}")
        elif not isinstance(self.key_sha256, str) or not _HASH.fullmatch(self.key_sha256):
            raise SpecError(f"key {self.name!r} has a key_sha256 that is not 64 small hexadecimal digits")
        for limit in ("max_requests", "tokens_per_minute"):
            value = getattr(self, limit)
            if value is not None and not is_integer(value, 1):
                raise SpecError(
                    f"key {self.name!r} has {limit}={value!r}; give a number of at least 1, or leave it out"
                )

    @staticmethod
    def read(given: Key | Mapping[str, object]) -> Key:
        """Return a key from a table of the configuration file. Raises SpecError."""
        if isinstance(given, Key):
            return given
        known = [each.name for each in fields(Key)]
        unknown = [name for name in given if name not in known]
        if unknown or "name" not in given:
            wrong = f"has {unknown[0]!r}" if unknown else "has no name"
            raise SpecError(f"a table of keys {wrong}; its fields are {', '.join(known)}")
        return Key(**given)  # type: ignore[arg-type]  # checked there

    @property
    def hash(self) -> bytes:
        return hash_key(self.key.encode()) if self.key is not None else bytes.fromhex(self.key_sha256 or "")


def check_key(key: object, what: str) -> None:
    """Raise SpecError for a key that no client could send."""
    if not isinstance(key, str) or not key or key != key.strip():
        raise SpecError(f"{what} is empty or has spaces around it; give one without, or none")


def hash_key(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@dataclass
class Use:
    """Counts the requests and tokens of a key, and limits them.

    Tokens are taken from an account, which is refilled at `tokens_per_minute`, up to one minute's tokens. A request is
    refused while the account is empty. The tokens of a request are known only at its end, so it may leave a debt.
    """

    key: Key
    clock: Callable[[], float] = time.monotonic
    n_requests: int = 0
    _level: float = field(init=False)
    _as_of: float = field(init=False)

    def __post_init__(self) -> None:
        self._level, self._as_of = float(self.key.tokens_per_minute or 0), self.clock()

    def check(self) -> None:
        """Raise ApiError 429 if the key's limits allow no request now."""
        most, rate = self.key.max_requests, self.key.tokens_per_minute
        if most is not None and self.n_requests >= most:
            raise too_many("requests of a key", n=most)
        if rate is not None and self._refilled() <= 0:
            seconds = math.ceil((1 - self._level) * 60 / rate)
            raise too_many("tokens of a key", n=rate, seconds=seconds)

    def charge(self, n_tokens: int) -> None:
        """Charge tokens of a prompt or a reply."""
        if self.key.tokens_per_minute is not None:
            self._level = self._refilled() - n_tokens

    def _refilled(self) -> float:
        most, now = float(self.key.tokens_per_minute or 0), self.clock()
        self._level = min(most, self._level + most * (now - self._as_of) / 60)
        self._as_of = now
        return self._level


class Keys:
    """Finds the key that a client has sent.

    Raises SpecError if two keys, or the names of two keys, are equal.
    """

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self._uses = [(key.hash, Use(key)) for key in keys]
        for what in ({hash for hash, _ in self._uses}, {key.name for key in keys}):
            if len(what) < len(keys):
                raise SpecError("two keys are the same, or have one name; give each client one of its own")

    def __bool__(self) -> bool:
        return bool(self._uses)

    def find(self, key: bytes) -> Use | None:
        """Return the usage counter of a key, or None if there is no such key.

        All keys are compared each time, so that the time reveals nothing about the keys.
        """
        given, found = hash_key(key), None
        for known, use in self._uses:
            # Hashes are compared, so that the time does not reveal even the key's length.
            if hmac.compare_digest(given, known):
                found = use
        return found
