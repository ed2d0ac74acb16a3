"""Block tables say which blocks of a pool each slot refers to, like the page table of an attention cache."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memory.blocks.arrays import EMPTY, Int64s
from memory.blocks.holdings import Holding, Part, Record
from memory.blocks.pool import BlockPool
from memory.errors import IntegrityError


class BlockTable:
    """Maps each slot to the blocks of one pool that it refers to, in order, and holds a reference to each.

    Attributes:
        ids: slot -> (n,) block ids; a slot may be missing if it refers to none.
        numbers: name -> slot -> an integer that goes with the slot's blocks; a slot is missing if it is 0.
    """

    def __init__(self, pool: BlockPool, what: str, *numbers: str) -> None:
        self.pool = pool
        self.ids: dict[int, Int64s] = {}
        self.numbers: dict[str, dict[int, int]] = {name: {} for name in numbers}
        self._what = what

    def __getitem__(self, slot: int) -> Int64s:
        """Return (n,) the ids of a slot's blocks."""
        return self.ids.get(slot, EMPTY)

    def counts(self, slots: Int64s) -> Int64s:
        """Return (S,) the number of blocks that each slot refers to."""
        return np.array([len(self[slot]) for slot in slots.tolist()], np.int64)

    def column(self, name: str, slots: Int64s) -> Int64s:
        """Return (S,) one of the numbers that go with the blocks of each slot."""
        column = self.numbers[name]
        return np.array([column.get(slot, 0) for slot in slots.tolist()], np.int64)

    def set(self, slot: int, ids: Int64s, **numbers: int) -> None:
        """Make a slot refer to these blocks, whose references pass to it, and set its numbers."""
        self.ids[slot] = ids
        for name, value in numbers.items():
            if value:
                self.numbers[name][slot] = value
            else:
                self.numbers[name].pop(slot, None)

    def append(self, slot: int, ids: Int64s) -> None:
        """Make a slot refer to these blocks as well, behind its others."""
        self.ids[slot] = np.concatenate([self[slot], ids])

    def truncate(self, slot: int, n_kept: int) -> None:
        """Release a slot's blocks behind the first `n_kept`."""
        ids = self[slot]
        if n_kept < len(ids):
            self.pool.release(ids[n_kept:])
            self.ids[slot] = ids[:n_kept]

    def release(self, slot: int) -> None:
        """Release all blocks of a slot."""
        for column in self.numbers.values():
            column.pop(slot, None)
        self.pool.release(self.ids.pop(slot, EMPTY))

    def share(self, sources: Int64s, targets: Int64s) -> None:
        """Make each target refer to the blocks of its source, all at once. Copies no block."""
        held = [
            (self.ids.get(slot), [column.get(slot, 0) for column in self.numbers.values()]) for slot in sources.tolist()
        ]
        for ids, _ in held:
            if ids is not None:
                self.pool.retain(ids)
        for slot, (ids, values) in zip(targets.tolist(), held, strict=True):
            self.release(slot)
            if ids is not None:
                self.set(slot, ids, **dict(zip(self.numbers, values, strict=True)))

    def holding(self, part: Part, slots: Int64s, starts: Int64s, ends: Int64s | None = None) -> Holding:
        """Return the blocks of slots (S,), as this part of their memory, for tokens [start, end)."""
        return Holding.of_tables(self.pool.name, part, [self[slot] for slot in slots.tolist()], starts, ends)

    def record(self, slot: int) -> Record:
        """Return what a saved file says of a slot beside its blocks' bytes."""
        return {name: [column.get(slot, 0)] for name, column in self.numbers.items()}

    def adopt(self, slot: int, record: Record, ids: Int64s) -> None:
        """Make an empty slot refer to blocks with the bytes of a saved file. Raises KeyError or ValueError."""
        numbers = {name: int(record[name][0]) for name in self.numbers}
        self.set(slot, ids, **numbers)

    def check(self, open_slots: Iterable[int], in_flight: Iterable[Int64s] = ()) -> None:
        """Raise IntegrityError if a slot that is not open has blocks, or if references do not match.

        Args:
            in_flight: blocks of open steps, which no slot refers to yet.
        """
        held = self.ids.keys() | {slot for column in self.numbers.values() for slot in column}
        if closed := held - set(open_slots):
            raise IntegrityError(f"{self._what} are held for slots that are not open: {sorted(closed)}")
        self.pool.check(np.concatenate([EMPTY, *self.ids.values(), *in_flight]))
