"""Holds the facts that a router must know about a prompt: its length, its session, and the digests of its prefixes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybridmem.memory.prefix import digests_at


class Prompt(Protocol):
    """Declares the attributes of a prompt that a router needs.

    Attributes:
        session: the conversation to which the prompt belongs. None: the client names none.
        n_tokens: the prompt's length.
    """

    @property
    def session(self) -> str | None: ...
    @property
    def n_tokens(self) -> int: ...
    def digests(self, positions: Collection[int]) -> Iterable[tuple[int, bytes]]:
        """Return (position, digest) of the prompt's prefixes that end at these positions, ascending."""
        ...


@dataclass(frozen=True)
class TokenPrompt:
    """Holds a prompt's tokens on their way from the gateway to a replica.

    Attributes:
        tokens: the token ids, int32, little-endian. Empty for a request without a prompt, or with a bad one.
        owner: the owner of the prefixes from which the prompt may continue.
        pinned: the replica that must get the prompt, if that replica is alive. This is for tests and repairs.
    """

    tokens: bytes = b""
    owner: bytes | None = None
    session: str | None = None
    pinned: str | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // 4

    def digests(self, positions: Collection[int]) -> Iterator[tuple[int, bytes]]:
        return digests_at(self.array(), positions, self.owner)

    def array(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the tokens, (n_tokens,) int64."""
        return np.frombuffer(self.tokens, "<i4").astype(np.int64)
