"""Defines pools, which hold reference-counted blocks of one size that are taken from the arena."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Protocol
from weakref import WeakSet

import numpy as np

from hybridmem.memory.blocks.arena import Arena
from hybridmem.memory.blocks.arrays import EMPTY, Int64s
from hybridmem.memory.blocks.journal import Journal
from hybridmem.memory.errors import CapacityError, IntegrityError


class Sized(Protocol):
    """Declares what a pool reads of the tables that refer to its blocks."""

    @property
    def book_bytes(self) -> int: ...


def _runs(block_bytes: int, *addresses: Int64s) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (first, end, addresses) for blocks [first, end) that are contiguous in all arrays of addresses.

    Most blocks that were allocated together are contiguous.
    """
    if len(addresses[0]) == 1:
        yield 0, 1, [int(of[0]) for of in addresses]
        return
    breaks = [(of[1:] - of[:-1] != block_bytes).nonzero()[0] + 1 for of in addresses]
    bounds = sorted({0, *np.concatenate(breaks).tolist(), len(addresses[0])})
    for first, end in itertools.pairwise(bounds):
        yield first, end, [int(of[first]) for of in addresses]


_FEW = 8
"""For at most this many blocks, a loop counts references faster than numpy does."""


class BlockPool:
    """Holds reference-counted blocks of one size in an arena. A block is written only while its count is 1.

    Attributes:
        addresses: (n_ids,) the byte address of each block. It is meaningless for ids that are not in use.
        counts: (n_ids,) how many references each block has; 0 for a free one.
        tables: the living tables that refer to the blocks. `book_bytes` asks them for their sizes.
        journal: the memory's journal. The pool's arrays follow from its tables and the open steps: see `recount`.
    """

    def __init__(
        self, arena: Arena, name: str, block_bytes: int, *, from_top: bool, on_change: Callable[[int, int], None],
        journal: Journal | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.block_bytes = block_bytes
        self.n_used = 0
        self.addresses = np.zeros(16, np.int64)
        self.counts = np.zeros(16, np.int64)
        self.tables: WeakSet[Sized] = WeakSet()
        self.journal = Journal() if journal is None else journal
        self._arena = arena
        self._from_top = from_top
        self._on_change = on_change
        self._free_ids = list(range(15, -1, -1))
        self._frozen_book_bytes: int | None = None

    @property
    def used_bytes(self) -> int:
        return self.n_used * self.block_bytes

    @property
    def book_bytes(self) -> int:
        """Return the bytes of host memory that store where blocks are and what refers to them. Cost: O(slots)."""
        if self._frozen_book_bytes is not None:
            return self._frozen_book_bytes
        own = self.addresses.nbytes + self.counts.nbytes + 8 * len(self._free_ids)
        return own + sum(table.book_bytes for table in self.tables)

    def allocate(self, n: int) -> Int64s:
        """Allocate `n` blocks with one reference each, and return ids (n,).

        Raises CapacityError with nothing allocated.
        """
        arena, needed = self._arena, n * self.block_bytes
        # The ids come first, because the pool's arrays may have to grow. If that fails, no bytes have been taken.
        ids = self._next_ids(n) if needed <= arena.free_bytes else EMPTY
        addresses = arena.allocate_many(len(ids), self.block_bytes, from_top=self._from_top)
        if len(addresses) < n:
            for address in addresses:
                arena.free(address, self.block_bytes)
            raise CapacityError.of(
                f"{n} x {self.name} need", needed, arena.free_bytes, arena.capacity_bytes, arena.unit
            )
        del self._free_ids[len(self._free_ids) - n :]
        self.addresses[ids], self.counts[ids] = addresses, 1
        self.n_used += n
        for first, end, (start,) in _runs(self.block_bytes, np.sort(self.addresses[ids])):
            self._on_change(start, (end - first) * self.block_bytes)
        return ids

    def retain(self, ids: Int64s) -> None:
        """Add a reference to each block. An id may occur several times. A negative id stands for no block."""
        if len(ids) > _FEW:
            np.add.at(self.counts, ids[ids >= 0], 1)
        else:
            for block in ids.tolist():
                if block >= 0:
                    self.counts[block] += 1

    def release(self, ids: Int64s) -> None:
        """Remove a reference from each block, and free blocks without references. A negative id stands for no block.

        Inside a change, releasing waits until the change counts, so the caller must not modify the ids.
        """
        if len(ids):
            self.journal.after(self._release, ids)

    def _release(self, ids: Int64s) -> None:
        if len(ids) > _FEW:
            ids = ids[ids >= 0]
            np.subtract.at(self.counts, ids, 1)
            dead = ids[self.counts[ids] == 0]
            freed: list[int] = np.unique(dead).tolist() if len(dead) else []
        else:
            freed = []
            for block in ids.tolist():
                if block < 0:
                    continue
                self.counts[block] -= 1
                if not self.counts[block]:
                    freed.append(block)
        if not freed:
            return
        self._free_ids.extend(freed)
        self.n_used -= len(freed)
        for first, end, (start,) in _runs(self.block_bytes, np.sort(self.addresses[freed])):
            self._arena.free(start, (end - first) * self.block_bytes)
            self._on_change(start, (end - first) * self.block_bytes)

    def recount(self, references: Iterable[Int64s]) -> None:
        """Count references anew from arrays of ids, which have one entry for each reference, and list the free ids.

        The caller then calls `Arena.rebuild`. An interrupted call may have left the pool's arrays at different lengths.
        """
        n_ids = max(len(self.addresses), len(self.counts))
        self.addresses = np.pad(self.addresses, (0, n_ids - len(self.addresses)))
        held = np.concatenate([EMPTY, *references])
        self.counts = np.bincount(held, minlength=n_ids)
        self._free_ids = np.flatnonzero(self.counts == 0)[::-1].tolist()
        self.n_used = n_ids - len(self._free_ids)

    def frozen(self) -> BlockPool:
        """Return a copy for reading, whose addresses, counts and book bytes stay as they are now."""
        twin = copy(self)
        twin.addresses, twin.counts = self.addresses.copy(), self.counts.copy()
        # The copy shares the pool's tables, which continue to change.
        twin._frozen_book_bytes = self.book_bytes
        return twin

    def within(self, start: int, end: int) -> Int64s:
        """Return the ids of the blocks in use at addresses [start, end)."""
        ids: Int64s = ((self.addresses >= start) & (self.addresses < end) & (self.counts > 0)).nonzero()[0]
        return ids

    def used_ranges(self) -> list[tuple[int, int]]:
        """Return the byte range [start, end) of each block in use."""
        starts = self.addresses[self.counts > 0].tolist()
        return [(start, start + self.block_bytes) for start in starts]

    def check(self, references: Iterable[Int64s]) -> None:
        """Raise IntegrityError unless the counts match these arrays of ids, which have one entry for each reference."""
        expected = np.zeros_like(self.counts)
        for ids in references:
            if len(ids) and not 0 <= ids.min() <= ids.max() < len(expected):
                raise IntegrityError(
                    f"{self.name} block ids {ids.min()} ... {ids.max()} are held, {len(expected)} exist"
                )
            np.add.at(expected, ids, 1)
        wrong = np.flatnonzero(expected != self.counts)
        if len(wrong):
            block = int(wrong[0])
            raise IntegrityError(
                f"{self.name} block {block} counts {self.counts[block]} references, {expected[block]} are held"
            )
        if sorted(self._free_ids) != np.flatnonzero(self.counts == 0).tolist():
            raise IntegrityError(f"{self.name} blocks are free and in use at once, or neither")
        if self.n_used != int((self.counts > 0).sum()):
            raise IntegrityError(f"{self.name} counts {self.n_used} blocks in use, {int((self.counts > 0).sum())} are")

    def _next_ids(self, n: int) -> Int64s:
        """Return the next `n` free ids. The pool's arrays grow if there are too few."""
        while len(self._free_ids) < n:
            n_ids = len(self.counts)
            room = np.zeros(n_ids, np.int64)
            addresses, counts = (np.concatenate([column, room]) for column in (self.addresses, self.counts))
            free_ids = [*range(2 * n_ids - 1, n_ids - 1, -1), *self._free_ids]
            self.addresses, self.counts, self._free_ids = addresses, counts, free_ids
        return np.array(self._free_ids[len(self._free_ids) - n :][::-1], np.int64)
