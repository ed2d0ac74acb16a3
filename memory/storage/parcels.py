"""Defines parcels: blocks that left the budget together, in host memory or in a file, until nothing refers to them.

The copy of a slot refers to each of its blocks by a place, which is a parcel and a row in it. So a block that several
checkpoints shared in the arena is in one parcel once, and yet each checkpoint can leave and return alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import EMPTY, Bools, Int64s
from hybridmem.memory.blocks.holdings import Record

Blocks = dict[str, Tensor]
"""Maps a pool to the bytes of blocks, (n, block_bytes) uint8."""

Places = dict[str, Int64s]
"""Maps a pool to (2, n): for each block of a slot, the parcel that holds it, and its row there."""


@dataclass(eq=False)
class Parcel:
    """Holds blocks of one or more pools, in host memory or in a file.

    Attributes:
        blocks: the blocks, if they are in host memory. Empty if they are in a file.
        path: the file that holds the blocks, if there is one.
        is_own: True if the file is removed together with the parcel. Files of saved caches stay.
        n_bytes: the bytes of its blocks.
        rename: a function that gives blocks read from the file this memory's names of pools.
        n_holders: how many slots have blocks in the parcel.
        arriving: the blocks that another thread is reading from the file.
    """

    blocks: Blocks
    n_bytes: int
    path: str | None = None
    is_own: bool = True
    rename: Callable[[Blocks], Blocks] = lambda blocks: blocks
    n_holders: int = 0
    arriving: Future[Blocks] | None = None


@dataclass(frozen=True)
class Kept:
    """Holds the copy of a slot: the records of its layer memories, and the places of its blocks."""

    records: dict[str, Record]
    places: Places

    @property
    def parcels(self) -> list[int]:
        """Return the numbers of the parcels that hold its blocks, each once."""
        return sorted({parcel for places in self.places.values() for parcel in np.unique(places[0]).tolist()})


class Twins:
    """Maps blocks of one pool in the arena to their twins: the places outside that have the same bytes.

    A block of the arena may be written or used again when nothing holds it any more. So its twin is known only while a
    checkpoint guards the block. Checkpoints never change. A checkpoint guards a block if it holds the block and `guard`
    was called for it.
    """

    def __init__(self) -> None:
        # This array and the two below have one element for each block id.
        self._places = np.full((2, 16), -1, np.int64)
        self._live = np.zeros(16, np.int64)
        self._n_guards = np.zeros(16, np.int64)
        self._guarded: dict[int, Int64s] = {}  # Maps a slot to the blocks that it guards.

    def guard(self, slot: int, ids: Int64s, live: Int64s, places: Int64s) -> None:
        """Let a checkpoint guard blocks whose twins are at these places (2, n).

        Args:
            live: (n,) which rows of each block the twin has, in the form of `live_keys`. A block that already has a
                twin with other rows is left out.
        """
        self._grow_to(int(ids.max(initial=-1)) + 1)
        guarded = self._guarded.get(slot, EMPTY)
        is_free = (self._n_guards[ids] == 0) | (self._live[ids] == live)
        at: Int64s = (is_free & ~np.isin(ids, guarded)).nonzero()[0]
        at = at[np.unique(ids[at], return_index=True)[1]]
        new = ids[at]
        self._live[new], self._places[:, new] = live[at], places[:, at]
        self._n_guards[new] += 1
        self._guarded[slot] = np.concatenate([guarded, new])

    def forget(self, slot: int) -> None:
        """Let a slot guard no blocks any more."""
        if slot in self._guarded:
            self._n_guards[self._guarded.pop(slot)] -= 1

    def places_of(self, ids: Int64s, live: Int64s, is_kept: Callable[[Int64s], Bools]) -> Int64s:
        """Return (2, n) the places of these blocks' twins, or (-1, -1) for a block without a twin that is kept."""
        self._grow_to(int(ids.max(initial=-1)) + 1)
        places = self._places[:, ids]
        is_twin = (ids >= 0) & (self._n_guards[ids] > 0) & (self._live[ids] == live) & is_kept(places[0])
        return np.where(is_twin, places, -1)

    def ids_of(self, places: Int64s) -> Int64s:
        """Return (n,) the blocks in the arena whose twins are at these places (2, n), or -1 for a place without one.

        Cost: O(guarded blocks).
        """
        ids = self._n_guards.nonzero()[0]
        keys, wanted = as_keys(self._places[:, ids]), as_keys(places)
        if not len(ids):
            return np.full(len(wanted), -1)
        order = keys.argsort()
        at = order[np.searchsorted(keys[order], wanted).clip(max=len(ids) - 1)]
        return np.where(keys[at] == wanted, ids[at], -1)

    def _grow_to(self, n: int) -> None:
        if n > len(self._live):
            more = max(n, 2 * len(self._live)) - len(self._live)
            self._places = np.pad(self._places, ((0, 0), (0, more)), constant_values=-1)
            self._live, self._n_guards = np.pad(self._live, (0, more)), np.pad(self._n_guards, (0, more))


def live_keys(live: Bools) -> Int64s:
    """Return (n,) a number for each block that encodes which of its rows are live. `live` is (n, rows)."""
    weights = np.random.default_rng(0).integers(1, 1 << 62, live.shape[1])
    return np.asarray(live @ weights, np.int64)


def gather(places: Int64s, blocks_of: Callable[[int], Tensor]) -> Tensor | None:
    """Return (n, block_bytes) the blocks at these places (2, n), in this order, or None if there are none.

    They are copied unless they are consecutive rows of one parcel.
    """
    if not places.shape[1]:
        return None
    breaks = ((places[0][1:] != places[0][:-1]) | (places[1][1:] != places[1][:-1] + 1)).nonzero()[0] + 1
    runs = [
        blocks_of(int(places[0][begin]))[int(places[1][begin]) : int(places[1][begin]) + end - begin]
        for begin, end in pairwise([0, *breaks.tolist(), places.shape[1]])
    ]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def count_bytes(blocks: Mapping[str, Tensor]) -> int:
    """Return the bytes of these blocks."""
    return sum(tensor.numel() for tensor in blocks.values())


def as_keys(places: Int64s) -> Int64s:
    """Return (n,) one number that identifies each place."""
    keys: Int64s = (places[0] << 32) + places[1]
    return keys
