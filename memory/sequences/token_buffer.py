"""Defines buffers, which hold the token ids of a sequence, its forks and its checkpoints once (copy on write)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import islice
from typing import NamedTuple

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.interface import Packed, Sequence

_LEAST_TOKENS = 1024
"""Buffers of at most this many tokens are never shrunk."""


class Checkpoint(NamedTuple):
    """Describes a checkpoint in a buffer. Its horizon is computed only once, because a checkpoint never changes."""

    n_tokens: int
    id: int
    horizon: int
    handle: Sequence


def _order(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the key by which checkpoints of a buffer are sorted: the number of tokens, then the id."""
    return checkpoint[:2]


class TokenBuffer:
    """Holds token ids from position 0 on, for several sequences and checkpoints, each up to its own length.

    At most one live sequence, the writer, appends in place, and no other holder is longer. All others copy their tokens
    before they append. So making a checkpoint or a fork copies no tokens, and appending costs O(1) per token.

    Attributes:
        ids: (capacity,) the token ids. As many ids are valid as the longest sequence or checkpoint has.
        writer: the slot of the sequence that appends in place. None after this sequence was rolled back or left the
            buffer.
        live: the slots of all sequences in the buffer, checkpoints left out.
        checkpoints: all checkpoints in the buffer, sorted by their number of tokens.
        longest_tail: an upper bound on how many tokens any checkpoint is ahead of its horizon.
    """

    __slots__ = ("checkpoints", "ids", "live", "longest_tail", "writer")

    def __init__(self, ids: Int64s, writer: int) -> None:
        self.ids = ids
        self.writer: int | None = writer
        self.live = {writer}
        self.checkpoints: list[Checkpoint] = []
        self.longest_tail = 0

    def clear(self) -> None:
        """Forget which slots hold the buffer; the tokens stay."""
        self.writer = None
        self.live = set()
        self.checkpoints = []
        self.longest_tail = 0

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        if checkpoint.n_tokens >= self.checkpoint_tokens:  # A new checkpoint is mostly the longest one.
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
        """Return the number of tokens of the longest checkpoint."""
        return self.checkpoints[-1].n_tokens if self.checkpoints else 0

    def nearest(self, position: int, is_away: np.ndarray) -> tuple[int, Sequence | None]:
        """Return the furthest position <= `position` that a checkpoint of this buffer reaches, and that checkpoint.

        Args:
            position: up to this position the buffer's tokens are those of the caller.
            is_away: (n_slots,) True for slots that are swapped out. Such checkpoints cannot be used.
        Cost: O(log checkpoints), and O(1) for each checkpoint whose tail may reach the position.
        """
        first = bisect_right(self.checkpoints, position, key=lambda checkpoint: checkpoint.n_tokens)
        shorter = (self.checkpoints[i] for i in range(first - 1, -1, -1))
        below = next((checkpoint for checkpoint in shorter if not is_away[checkpoint.handle.slot]), None)
        if below is not None and below.n_tokens == position:
            return position, below.handle
        for above in islice(self.checkpoints, first, None):
            if above.n_tokens - position > self.longest_tail:
                break
            if above.horizon <= position and not is_away[above.handle.slot]:
                return position, above.handle
        return (0, None) if below is None else (below.n_tokens, below.handle)


def common_prefix(a: Int64s, b: Int64s) -> int:
    """Return how many leading tokens are the same. Cost: O(that number)."""
    n, start, size = min(len(a), len(b)), 0, 1024
    while start < n:
        end = min(n, start + size)
        differs = a[start:end] != b[start:end]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, size = end, 2 * size
    return n


def is_roomy(ids: Int64s, n_tokens: int) -> bool:
    """True if an array is far larger than `n_tokens` tokens need."""
    return len(ids) > 4 * n_tokens + _LEAST_TOKENS


def write_tokens(
    buffers: dict[int, TokenBuffer],
    packed: Packed,
    moved: Int64s,
    slots: list[int],
    starts: list[int],
    n_tokens: Int64s,
) -> None:
    """Write the first n_tokens[i] tokens of request moved[i] into the buffer of slots[i], from starts[i] on."""
    if packed.is_decode:
        tokens = packed.token_ids[moved].tolist()
        for slot, start, token in zip(slots, starts, tokens, strict=True):
            buffers[slot].ids[start] = token
        return
    begins, counts = packed.cu_seqlens[moved].tolist(), n_tokens.tolist()
    for slot, start, begin, n in zip(slots, starts, begins, counts, strict=True):
        buffers[slot].ids[start : start + n] = packed.token_ids[begin : begin + n]
