"""Ranks cached checkpoints by their worth, to choose those that are closed when the budget is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.interface import Sequence

_COMPUTED_AT_ONCE = 256
"""For how many checkpoints private bytes are computed at once. Computing them for a single one costs little less."""


class Ranking:
    """Ranks checkpoints by worth: priority x tokens saved / bytes that closing one frees / time since its last use.

    The bytes that closing a checkpoint frees (its private bytes) change whenever another sequence advances, so they
    must be computed anew. But they never exceed all bytes that it holds, and that number never changes. This gives a
    lower bound on the checkpoint's worth. Private bytes are computed only where the bounds leave the order open.
    """

    def __init__(self) -> None:
        # Maps a checkpoint to its row in the arrays. Rows of removed checkpoints are gaps.
        self._places: dict[Sequence, int] = {}
        self._n_places = 0
        self._saved = np.zeros(64)
        self._held_bytes = np.ones(64, np.int64)
        self._used_at = np.zeros(64, np.int64)
        self._priority = np.ones(64)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, checkpoint: Sequence) -> bool:
        return checkpoint in self._places

    def add(self, checkpoint: Sequence, saved: int, held_bytes: int, priority: float = 1) -> None:
        """Add a checkpoint that saves computing `saved` tokens, and refers to `held_bytes` bytes."""
        if self._n_places == len(self._saved):
            self._close_gaps()
        place = self._places[checkpoint] = self._n_places
        self._n_places += 1
        self._saved[place], self._held_bytes[place], self._priority[place] = saved, max(held_bytes, 1), priority

    def _close_gaps(self) -> None:
        """Remove the gaps from the arrays, and make room for as many new checkpoints as there are now."""
        kept = self._kept()
        self._places = {checkpoint: place for place, checkpoint in enumerate(self._places)}
        self._n_places = len(kept)
        self._saved, self._held_bytes, self._used_at, self._priority = (
            np.concatenate([column[kept], np.ones(max(64, len(kept)), column.dtype)])
            for column in (self._saved, self._held_bytes, self._used_at, self._priority)
        )

    def _kept(self) -> Int64s:
        return np.fromiter(self._places.values(), np.int64, len(self._places))

    def remove(self, checkpoint: Sequence) -> None:
        """Remove a checkpoint that is closed."""
        del self._places[checkpoint]

    def use(self, checkpoint: Sequence, clock: int) -> None:
        """Set the time of a checkpoint's last use to `clock`."""
        self._used_at[self._places[checkpoint]] = clock

    def saves(self, checkpoint: Sequence, saved: int) -> None:
        """Set how many tokens a checkpoint saves from now on."""
        self._saved[self._places[checkpoint]] = saved

    def prefer(self, checkpoint: Sequence, priority: float) -> None:
        """Set the factor on a checkpoint's worth. A checkpoint of infinite worth is never chosen."""
        self._priority[self._places[checkpoint]] = priority

    def ascending(
        self, clock: int, private_bytes: Callable[[list[Sequence]], Int64s]
    ) -> Iterator[tuple[Sequence, int]]:
        """Generate checkpoints with their private bytes, the least worth first, and of equal ones the older first.

        Nothing may change until the generator ends.

        Cost: sorting all bounds, and `private_bytes` of those checkpoints whose bounds leave the order open.
        """
        checkpoints, kept = list(self._places), self._kept()
        if (is_pinned := np.isinf(self._priority[kept])).any():
            checkpoints = [checkpoints[i] for i in (~is_pinned).nonzero()[0].tolist()]
            kept = kept[~is_pinned]
        saved, ages = self._saved[kept] * self._priority[kept], 1 + clock - self._used_at[kept]
        bounds = saved / self._held_bytes[kept] / ages
        order = bounds.argsort()
        # A heap of checkpoints whose exact worth is known. Each entry is (worth, index, private bytes); older ones have
        # lower indices.
        found: list[tuple[float, int, int]] = []
        for begin in range(0, len(order), _COMPUTED_AT_ONCE):
            exact, rest = order[begin : begin + _COMPUTED_AT_ONCE], order[begin + _COMPUTED_AT_ONCE :]
            n_bytes = private_bytes([checkpoints[i] for i in exact.tolist()])
            worth = saved[exact] / np.maximum(n_bytes, 1) / ages[exact]
            for entry in zip(worth.tolist(), exact.tolist(), n_bytes.tolist(), strict=True):
                heappush(found, entry)
            while found and (not len(rest) or found[0][0] < bounds[rest[0]]):
                _, i, n = heappop(found)
                yield checkpoints[i], n
