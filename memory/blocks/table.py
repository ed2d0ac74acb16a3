"""Defines block tables: which blocks of a pool each slot refers to. The page table of an attention cache is one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hybridmem.memory.blocks.arrays import EMPTY, Int64s
from hybridmem.memory.blocks.holdings import Holding, Part, Record
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.errors import IntegrityError


@dataclass(eq=False, slots=True)
class _Buffer:
    """Holds block ids for several slots, so that ids shared by a sequence and its checkpoints are stored only once.

    One slot, the writer, appends in place. The other slots see a part that never changes.

    Attributes:
        ids: (capacity,) the block ids.
        writer: the slot that appends; -1 after the writer has left the buffer.
        n_frozen: how many entries, from the first on, slots other than the writer may see.
    """

    ids: Int64s
    writer: int
    n_frozen: int = 0

    def may_write(self, slot: int, start: int, end: int) -> bool:
        """True if a slot may write entries [start, end)."""
        return self.writer == slot and self.n_frozen <= start and end <= len(self.ids)


@dataclass(eq=False, slots=True)
class _Row:
    """Says where the ids of a slot are: `buffer.ids[start:end]` and, unless it is -1, `last` after them.

    It never changes. It is not a frozen dataclass, because creating one takes three times as long.

    The writer may replace its last block by a copy. So a slot that shares the ids stores the last id separately.
    """

    buffer: _Buffer
    start: int
    end: int
    last: int = -1

    def __len__(self) -> int:
        return self.end - self.start + (self.last >= 0)

    @property
    def ids(self) -> Int64s:
        ids = self.buffer.ids[self.start : self.end]
        if self.last < 0:
            return ids
        # `np.append` takes six times as long, and displays of the memory ask for thousands of these arrays.
        whole = np.empty(len(ids) + 1, np.int64)
        whole[:-1], whole[-1] = ids, self.last
        return whole

    def parts(self) -> list[Int64s]:
        """Return the ids in one or two arrays.

        They are not joined, because memory may be full, and joining them takes some memory.
        """
        ids = self.buffer.ids[self.start : self.end]
        return [ids] if self.last < 0 else [ids, np.array([self.last])]

    def shared(self) -> _Row:
        """Return a row for another slot that shares the ids, and prevent the writer from changing them."""
        if self.last >= 0 or not len(self):
            return self
        self.buffer.n_frozen = max(self.buffer.n_frozen, self.end - 1)
        return _Row(self.buffer, self.start, self.end - 1, int(self.buffer.ids[self.end - 1]))

    def cut(self, first: int, end: int) -> _Row:
        """Return a row with only the blocks [first, end) of this row."""
        last = self.last if first < end == len(self) else -1
        return _Row(self.buffer, self.start + first, self.start + end - (last >= 0), last)


class BlockTable:
    """Maps each slot to the blocks of one pool that it refers to, in order, and holds a reference to each.

    A sequence and its checkpoints hold their ids in host memory only once. A sequence of a million tokens with a
    checkpoint at every 512th token has half a megabyte of ids, not half a gigabyte.

    Attributes:
        numbers: name -> slot -> a counter of the slot's blocks. A slot whose counter is 0 is left out.
    """

    def __init__(self, pool: BlockPool, what: str, *numbers: str) -> None:
        self.pool = pool
        self.numbers: dict[str, dict[int, int]] = {name: {} for name in numbers}
        self._rows: dict[int, _Row] = {}
        self._what = what
        pool.tables.add(self)

    @property
    def book_bytes(self) -> int:
        """Return the bytes of the ids in host memory. Cost: O(slots)."""
        return sum(buffer.ids.nbytes for buffer in {row.buffer for row in self._rows.values()})

    def __contains__(self, slot: int) -> bool:
        return slot in self._rows

    def __getitem__(self, slot: int) -> Int64s:
        """Return (n,) the ids of a slot's blocks. Use them before the slot changes. Cost: up to O(n)."""
        row = self._rows.get(slot)
        return EMPTY if row is None else row.ids

    def of_all(self, slots: list[int]) -> list[Int64s]:
        """Return the ids of each slot's blocks. For many slots it is faster than `table[slot]` for each."""
        rows = map(self._rows.get, slots)
        return [
            EMPTY if row is None else row.buffer.ids[row.start : row.end] if row.last < 0 else row.ids for row in rows
        ]

    def counts(self, slots: Int64s) -> Int64s:
        """Return (S,) the number of blocks that each slot refers to."""
        rows = map(self._rows.get, slots.tolist())
        return np.array([0 if row is None else len(row) for row in rows], np.int64)

    def column(self, name: str, slots: Int64s) -> Int64s:
        """Return (S,) one counter, chosen by its name, for each slot."""
        column = self.numbers[name]
        if not column:
            return np.zeros_like(slots)
        return np.array([column.get(slot, 0) for slot in slots.tolist()], np.int64)

    def set(self, slot: int, ids: Int64s, **numbers: int) -> None:
        """Make a slot refer to these blocks, and set its counters. The slot takes over the references to the blocks."""
        self._note(slot)
        self._leave(slot)
        self._rows[slot] = _Row(_Buffer(ids, slot), 0, len(ids))
        self._set_numbers(slot, numbers)

    def _note_row(self, slot: int) -> None:
        """Let the journal keep where the ids of a slot are, because that is about to change. Its counters stay."""
        self.pool.journal.before(self._put_row_back, slot, self._rows.get(slot))

    def _put_row_back(self, slot: int, row: _Row | None) -> None:
        if row is None:
            self._rows.pop(slot, None)
        else:
            self._rows[slot] = row

    def _note(self, slot: int) -> None:
        """Let the journal keep which blocks a slot refers to, and its `numbers`, so that a change can be undone."""
        self.pool.journal.before(self._put_back, slot, self._rows.get(slot), self._numbers_of(slot))

    def _put_back(self, slot: int, row: _Row | None, numbers: dict[str, int]) -> None:
        self._put_row_back(slot, row)
        self._set_numbers(slot, numbers)

    def _numbers_of(self, slot: int) -> dict[str, int]:
        return {name: column.get(slot, 0) for name, column in self.numbers.items()} if self.numbers else {}

    def _set_numbers(self, slot: int, numbers: dict[str, int]) -> None:
        for name, value in numbers.items():
            if value:
                self.numbers[name][slot] = value
            else:
                self.numbers[name].pop(slot, None)

    def append(self, slot: int, ids: Int64s) -> None:
        """Make a slot refer to these blocks as well, after its others. The cost is mostly O(their number)."""
        row = self._rows.get(slot)
        self.replace(slot, 0 if row is None else len(row), ids)

    def reserve(self, slot: int, at: int, end: int) -> None:
        """Make room for blocks number [at, end) of a slot, so that `replace` cannot fail there."""
        row = self._rows.get(slot)
        if row is None or not row.buffer.may_write(slot, row.start + at, row.start + end):
            room = np.empty(2 * end + 16, np.int64)
            ids = self[slot]
            room[: len(ids)] = ids
            # This is a single assignment: an exception at any moment leaves the slot with the same blocks.
            self._rows[slot] = _Row(_Buffer(room, slot), 0, len(ids))
            if row is not None and row.buffer.writer == slot:
                row.buffer.writer = -1

    def replace(self, slot: int, at: int, ids: Int64s) -> None:
        """Replace a slot's blocks from block number `at` on by these blocks.

        The slot takes over the references to the new blocks; the caller takes over those to the old blocks.
        """
        self._note_row(slot)
        row, n = self._rows.get(slot), at + len(ids)
        if row is None or not row.buffer.may_write(slot, row.start + at, row.start + n):
            room = np.empty(n + max(n, 16), np.int64)
            room[:at] = self[slot][:at]
            self._leave(slot)
            row = _Row(_Buffer(room, slot), 0, 0)
        elif at < row.end - row.start:
            overwritten = slice(row.start + at, row.end)
            self.pool.journal.before(_write, row.buffer.ids, overwritten, row.buffer.ids[overwritten].copy())
        row.buffer.ids[row.start + at : row.start + n] = ids
        self._rows[slot] = _Row(row.buffer, row.start, row.start + n)

    def leave_behind(self, slot: int, n: int) -> Int64s:
        """Take the first `n` blocks from a slot, and return them. The caller takes over the references to them."""
        # The caller will change the slot's number of blocks left behind, so the journal must keep that as well.
        self._note(slot)
        row, ids = self._rows[slot], self[slot][:n]
        self._rows[slot] = row.cut(n, len(row))
        return ids

    def truncate(self, slot: int, n_kept: int) -> None:
        """Release a slot's blocks after the first `n_kept`."""
        row = self._rows.get(slot)
        if row is not None and n_kept < len(row):
            self._note_row(slot)
            self._rows[slot] = row.cut(0, n_kept)
            self._release(row.cut(n_kept, len(row)))

    def release(self, slot: int) -> None:
        """Release all blocks of a slot."""
        row = self._rows.get(slot)
        if row is None:
            for column in self.numbers.values():
                if slot in column:
                    break
            else:
                return
        self._note(slot)
        for column in self.numbers.values():
            column.pop(slot, None)
        self._leave(slot)
        if row is not None:
            self._release(row)

    def _release(self, row: _Row) -> None:
        for ids in row.parts():
            self.pool.release(ids)

    def _leave(self, slot: int) -> None:
        """Remove a slot from its buffer of ids."""
        row = self._rows.pop(slot, None)
        if row is not None and row.buffer.writer == slot:
            row.buffer.writer = -1

    def share(self, sources: Int64s, targets: Int64s) -> None:
        """Make each target refer to the blocks of its source, all at once. Copies no block."""
        pairs = [pair for pair in zip(targets.tolist(), sources.tolist(), strict=True) if pair[0] != pair[1]]
        taken: list[tuple[int, _Row | None, dict[str, int]]] = []
        for slot, source in pairs:
            row = self._rows.get(source)
            if row is not None:
                row = row.shared()
                for ids in row.parts():
                    self.pool.retain(ids)
            taken.append((slot, row, self._numbers_of(source)))
        for slot, row, numbers in taken:
            old = self._rows.get(slot)
            self._note(slot)
            self._leave(slot)
            if row is not None:
                self._rows[slot] = row
            self._set_numbers(slot, numbers)
            if old is not None:
                self._release(old)

    def holding(self, part: Part, slots: Int64s, starts: Int64s, ends: Int64s | None = None) -> Holding:
        """Return the blocks of slots (S,) as a `Holding` of this part, for tokens [start, end)."""
        rows = [*map(self._rows.get, slots.tolist())]
        lasts = np.array([-1 if row is None else row.last for row in rows], np.int64)
        parts = [starts[:0]]
        # Web pages ask for thousands of rows several times a second, so the ids of rows are copied into one array.
        for i, row in enumerate(rows):
            if row is not None:
                parts.append(row.buffer.ids[row.start : row.end])
                if row.last >= 0:
                    parts.append(lasts[i : i + 1])
        counts = np.array([0 if row is None else row.end - row.start for row in rows], np.int64) + (lasts >= 0)
        return Holding(self.pool.name, part, counts, np.concatenate(parts), starts, ends)

    def record(self, slot: int) -> Record:
        """Return a slot's record for a saved file, which has its blocks' bytes as well."""
        return {name: [column.get(slot, 0)] for name, column in self.numbers.items()}

    def adopt(self, slot: int, record: Record, ids: Int64s) -> None:
        """Make an empty slot refer to blocks that hold the bytes of a saved file. Raises KeyError or ValueError."""
        numbers = {name: int(record[name][0]) for name in self.numbers}
        self.set(slot, ids, **numbers)

    @property
    def references(self) -> list[Int64s]:
        """Return the ids of each slot's blocks. A block occurs in as many arrays as it has references."""
        return [part for row in self._rows.values() for part in row.parts()]

    def check(self, open_slots: Iterable[int]) -> None:
        """Raise IntegrityError if a slot that is not open has blocks."""
        held = self._rows.keys() | {slot for column in self.numbers.values() for slot in column}
        if closed := held - set(open_slots):
            raise IntegrityError(f"{self._what} are held for slots that are not open: {sorted(closed)}")


def _write(ids: Int64s, entries: slice, values: Int64s) -> None:
    ids[entries] = values
