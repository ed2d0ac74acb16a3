"""Which cached checkpoint is worth least, found without looking into each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

import numpy as np

from memory.blocks.arrays import Int64s
from memory.interface import Sequence

_ASKED_AT_ONCE = 256
"""Checkpoints whose private bytes are asked together: one costs little less."""


class Ranking:
    """Checkpoints by what they are worth: tokens that they save, by the byte that closing them frees, less the longer
    they were not used.

    What a checkpoint shares changes whenever anybody else moves on, so that its private bytes must be asked for. But
    they are never more than all that it holds, which is known for good: a bound on its worth, and only those that it
    does not rule out are asked.
    """

    def __init__(self) -> None:
        self._places: dict[Sequence, int] = {}  # rows of the columns, in the order in which they came, with gaps
        self._n_places = 0
        self._saved = np.zeros(64)
        self._held_bytes = np.ones(64, np.int64)
        self._used_at = np.zeros(64, np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def add(self, mark: Sequence, saved: int, held_bytes: int) -> None:
        """A checkpoint that saves so many tokens, and refers to so many bytes."""
        if self._n_places == len(self._saved):
            self._tidy()
        place = self._places[mark] = self._n_places
        self._n_places += 1
        self._saved[place], self._held_bytes[place] = saved, max(held_bytes, 1)

    def _tidy(self) -> None:
        """Close the gaps, and leave room for as many again."""
        kept = self._kept()
        self._places = {mark: place for place, mark in enumerate(self._places)}
        self._n_places = len(kept)
        self._saved, self._held_bytes, self._used_at = (
            np.concatenate([column[kept], np.ones(max(64, len(kept)), column.dtype)])
            for column in (self._saved, self._held_bytes, self._used_at)
        )

    def _kept(self) -> Int64s:
        return np.fromiter(self._places.values(), np.int64, len(self._places))

    def remove(self, mark: Sequence) -> None:
        del self._places[mark]

    def use(self, mark: Sequence, clock: int) -> None:
        self._used_at[self._places[mark]] = clock

    def saves(self, mark: Sequence, saved: int) -> None:
        """From now on it saves so many tokens."""
        self._saved[self._places[mark]] = saved

    def ascending(
        self, clock: int, private_bytes: Callable[[list[Sequence]], Int64s]
    ) -> Iterator[tuple[Sequence, int]]:
        """Those of least worth first, the older ones of equals, each with its private bytes.
        Nothing may change meanwhile.

        Cost: sorting all bounds, and asking for what they do not rule out.
        """
        marks, kept = list(self._places), self._kept()
        saved, ages = self._saved[kept], 1 + clock - self._used_at[kept]
        bounds = saved / self._held_bytes[kept] / ages
        order = bounds.argsort()
        found: list[tuple[float, int, int]] = []  # a heap of those asked: worth, index, private bytes
        for begin in range(0, len(order), _ASKED_AT_ONCE):
            asked, rest = order[begin : begin + _ASKED_AT_ONCE], order[begin + _ASKED_AT_ONCE :]
            n_bytes = private_bytes([marks[i] for i in asked.tolist()])
            worth = saved[asked] / np.maximum(n_bytes, 1) / ages[asked]
            for entry in zip(worth.tolist(), asked.tolist(), n_bytes.tolist(), strict=True):
                heappush(found, entry)
            while found and (not len(rest) or found[0][0] < bounds[rest[0]]):
                _, i, n = heappop(found)
                yield marks[i], n
