"""Counts the tokens of one sequence: which ones occurred, and how often each was chosen."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hybridmem.memory.blocks import Int64s
from hybridmem.memory.sequences import plain_ids


class TokenCounts:
    """Holds distinct token ids in growing arrays, which a step reads without a loop in Python.

    Args:
        prompt_ids: tokens that occurred without being chosen. Those of pictures do not count.
    """

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        known = sorted(set(plain_ids(prompt_ids)))
        self._index = {token_id: i for i, token_id in enumerate(known)}
        self._ids = np.array(known, np.int64)
        self._counts = np.zeros(len(known), np.int64)

    @property
    def ids(self) -> Int64s:
        """Return the distinct token ids, (n,)."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> Int64s:
        """Return how often each of `ids` was chosen, (n,)."""
        return self._counts[: len(self._index)]

    def add(self, token_id: int) -> None:
        """Count a token that was chosen."""
        at = self._index.setdefault(token_id, len(self._index))
        if at == len(self._ids):
            more = max(16, at)
            self._ids = np.concatenate([self._ids, np.zeros(more, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
        self._ids[at] = token_id
        self._counts[at] += 1

    def copy(self) -> TokenCounts:
        twin = TokenCounts()
        twin._index, twin._ids, twin._counts = dict(self._index), self._ids.copy(), self._counts.copy()
        return twin
