"""Token ids that a sequence, its forks and its checkpoints hold once, together (copy on write)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import islice
from typing import NamedTuple

import numpy as np

from memory.blocks.arrays import Int64s
from memory.interface import Sequence

_LEAST_TOKENS = 1024
"""Buffers of no more tokens than these are never too large."""


class Checkpoint(NamedTuple):
    """A checkpoint among the holders of a buffer: it never changes, so its horizon is asked for once."""

    n_tokens: int
    id: int
    horizon: int
    handle: Sequence


def _order(checkpoint: Checkpoint) -> tuple[int, int]:
    return checkpoint[:2]


class TokenBuffer:
    """Token ids from position 0 on. Each holder holds as many of them as it is long.

    One live holder at most, the writer, appends in place: no other one reaches further than it does. All others copy
    what they hold before they append. So a checkpoint or a fork costs no tokens, and appending stays O(1) a token.

    Attributes:
        ids: (capacity,) of which as many are valid as the longest holder has.
        writer: slot of the holder that appends in place; None after it went back, or left.
        live: slots of all holders that are no checkpoints.
        checkpoints: the others, those with the fewest tokens first.
        longest_tail: at least as long as the way from any checkpoint back to its horizon.
    """

    __slots__ = ("checkpoints", "ids", "live", "longest_tail", "writer")

    def __init__(self, ids: Int64s, writer: int) -> None:
        self.ids = ids
        self.writer: int | None = writer
        self.live = {writer}
        self.checkpoints: list[Checkpoint] = []
        self.longest_tail = 0

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        if checkpoint.n_tokens >= self.checkpoint_tokens:  # as most are: the longest, and the newest
            self.checkpoints.append(checkpoint)
        else:
            insort(self.checkpoints, checkpoint, key=_order)
        self.longest_tail = max(self.longest_tail, checkpoint.n_tokens - checkpoint.horizon)

    def remove_checkpoint(self, n_tokens: int, id: int) -> None:
        del self.checkpoints[bisect_left(self.checkpoints, (n_tokens, id), key=_order)]
        if not self.checkpoints:
            self.longest_tail = 0

    @property
    def checkpoint_tokens(self) -> int:
        """Tokens of the longest checkpoint."""
        return self.checkpoints[-1].n_tokens if self.checkpoints else 0

    def nearest(self, position: int, is_away: np.ndarray) -> tuple[int, Sequence | None]:
        """The furthest position <= `position` that a checkpoint of this buffer can be taken back to, and that
        checkpoint.

        Args:
            position: up to which the buffer is what the caller needs.
            is_away: (n_slots,) whether a checkpoint is swapped out: it serves nobody until it is back.
        Cost: O(log checkpoints), and those whose tail may reach the position.
        """
        first = bisect_right(self.checkpoints, position, key=lambda checkpoint: checkpoint.n_tokens)
        below = next(
            (self.checkpoints[i] for i in range(first - 1, -1, -1) if not is_away[self.checkpoints[i].handle.slot]),
            None,
        )
        if below is not None and below.n_tokens == position:
            return position, below.handle
        for above in islice(self.checkpoints, first, None):
            if above.n_tokens - position > self.longest_tail:
                break
            if above.horizon <= position and not is_away[above.handle.slot]:
                return position, above.handle
        return (0, None) if below is None else (below.n_tokens, below.handle)


def common_prefix(a: Int64s, b: Int64s) -> int:
    """How many leading tokens are the same. Cost: O(their number)."""
    n, start, size = min(len(a), len(b)), 0, 64
    while start < n:
        end = min(n, start + size)
        differs = a[start:end] != b[start:end]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, size = end, 2 * size
    return n


def is_roomy(ids: Int64s, n_tokens: int) -> bool:
    """Whether an array is far larger than so many tokens need."""
    return len(ids) > 4 * n_tokens + _LEAST_TOKENS
