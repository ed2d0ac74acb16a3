"""Defines the arena, which allocates byte ranges of one budget for blocks of every size.

The arena is one address space. Pages are taken from its low end, states and tails from its high end. Each block takes
its own size. Pages take the lowest free address first, states and tails the highest. So no kind has a fixed share of
the budget, and no block is padded to the size of another kind. `memory.blocks.compaction` joins free ranges that lie
apart.

`Arena` and `BlockPool` hold no tensors; `Store` holds the bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.layout import ALIGNMENT_BYTES
from hybridmem.memory.errors import BUDGET_UNIT, IntegrityError, SpecError

_MOST_BYTES = 1 << 62
"""The largest budget. It keeps addresses within int64."""


def read_budget(budget: float | str, option: str = "budget") -> int:
    """Read a budget, which is a number of bytes or a text such as "512MiB", "1.5 GB" or "80g". Raises SpecError.

    K, M, G and T are powers of 1000; Ki, Mi, Gi and Ti are powers of 1024. Case does not matter, and the B may be left
    out.

    Args:
        option: what the caller calls the budget, for error messages.
    """
    wanted: float = 0
    if isinstance(budget, int | float | np.integer | np.floating) and not isinstance(budget, bool):
        wanted = budget.item() if isinstance(budget, np.generic) else budget
        if math.isfinite(wanted) and wanted != int(wanted):
            raise SpecError(f"{option}={budget!r}; give a whole number of bytes, or text such as '2.5GiB'")
    elif isinstance(budget, str) and (
        match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", budget, re.ASCII | re.I)
    ):
        number, prefix, binary = match.groups()
        wanted = float(number) * (1024 if binary else 1000) ** " kmgt".index((prefix or " ").lower())
    if 1 <= wanted <= _MOST_BYTES:
        return int(wanted)
    most = f" of at most {_MOST_BYTES:,}" if _MOST_BYTES < wanted < math.inf else ""
    raise SpecError(f"{option}={budget!r}; give a positive number of bytes{most}, or text such as '512MiB' or '1GB'")


class Arena:
    """Holds the free byte ranges of [0, capacity_bytes). Neighbouring free ranges are joined.

    A range can be found by either of its ends, so that neighbours are joined at once. For each size and side of
    allocations, a heap finds the first range that is long enough. A heap may also name ranges that no longer exist.
    They are skipped when they come to the top.

    Args:
        unit: the `unit` of each CapacityError for this arena.
    """

    def __init__(self, capacity_bytes: int, unit: str = BUDGET_UNIT) -> None:
        self.unit = unit
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.free_bytes = 0
        self._ends: dict[int, int] = {}  # Maps the start of each free range to its end.
        self._starts: dict[int, int] = {}  # Maps the end of each free range to its start.
        # Maps (block size, from_top) to a heap of starts, or of negative ends.
        self._heaps: dict[tuple[int, bool], list[int]] = {}
        if self.capacity_bytes:
            self.free(0, self.capacity_bytes)

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - self.free_bytes

    def allocate(self, n_bytes: int, *, from_top: bool) -> int | None:
        """Allocate `n_bytes`, a multiple of ALIGNMENT_BYTES. Return the address, or None if no range is long enough.

        It costs as much as `allocate_many`.
        """
        return next(iter(self.allocate_many(1, n_bytes, from_top=from_top)), None)

    def allocate_many(self, n: int, n_bytes: int, *, from_top: bool) -> list[int]:
        """Allocate `n` blocks of `n_bytes` each, or as many as fit. Return their addresses.

        Each block takes the first free place. Cost: O(log free ranges) for each range from which blocks are taken.
        """
        addresses, heap = list[int](), self._heap(n_bytes, from_top)
        while heap and len(addresses) < n:
            start, end = self._named(heap[0], from_top)
            if end - start < n_bytes:
                heappop(heap)
                continue
            taken_bytes = min(n - len(addresses), (end - start) // n_bytes) * n_bytes
            del self._ends[start], self._starts[end]
            if from_top:
                addresses.extend(range(end - n_bytes, end - taken_bytes - 1, -n_bytes))
                end -= taken_bytes
            else:
                addresses.extend(range(start, start + taken_bytes, n_bytes))
                start += taken_bytes
            if start < end:
                self._ends[start], self._starts[end] = end, start
                self._enlist(-end if from_top else start, 0, end - start, from_top)
        self.free_bytes -= len(addresses) * n_bytes
        return addresses

    def take(self, start: int, n_bytes: int) -> None:
        """Allocate the first `n_bytes` of the free range that begins at `start`. Cost: O(log free ranges)."""
        end = self._ends.pop(start)
        del self._starts[end]
        if start + n_bytes < end:
            self._ends[start + n_bytes], self._starts[end] = end, start + n_bytes
            self._enlist(start + n_bytes, 0, end - start - n_bytes, from_top=False)
        self.free_bytes -= n_bytes

    def free_ranges(self) -> tuple[Int64s, Int64s]:
        """Return (n,) starts and ends of all free ranges, in order. Cost: O(n log n)."""
        starts, ends = (np.fromiter(names, np.int64, len(self._ends)) for names in (self._ends, self._starts))
        return np.sort(starts), np.sort(ends)

    def free(self, start: int, n_bytes: int) -> None:
        """Free a range. Cost: O(log free ranges)."""
        end = start + n_bytes
        low, high = self._starts.pop(start, start), self._ends.pop(end, end)
        self._ends[low], self._starts[high] = high, low
        self._enlist(low, start - low, high - low, from_top=False)
        self._enlist(-high, high - end, high - low, from_top=True)
        self.free_bytes += n_bytes

    def _enlist(self, name: int, bytes_before: int, bytes_now: int, from_top: bool) -> None:
        """Add a grown free range to the heaps of those sizes for which it was too short before."""
        for (n_bytes, side), heap in self._heaps.items():
            if side == from_top and bytes_before < n_bytes <= bytes_now:
                heappush(heap, name)

    def _named(self, name: int, from_top: bool) -> tuple[int, int]:
        """Return the free range that has this name in a heap, or an empty range if it no longer exists."""
        return (self._starts.get(-name, -name), -name) if from_top else (name, self._ends.get(name, name))

    def _heap(self, n_bytes: int, from_top: bool) -> list[int]:
        """Return a heap that names all free ranges of at least `n_bytes`, and few others. Amortized cost: O(1)."""
        heap = self._heaps.get((n_bytes, from_top))
        if heap is None or len(heap) > 2 * len(self._ends) + 64:
            heap = [-end if from_top else start for start, end in self._ends.items() if end - start >= n_bytes]
            heapify(heap)
            self._heaps[n_bytes, from_top] = heap
        return heap

    def rebuild(self, used_ranges: Seq[tuple[int, int]]) -> None:
        """Mark exactly these ranges as used and all other bytes as free, whatever the books say.

        Cost: O(ranges log ranges).
        """
        starts, ends = zip(*sorted(used_ranges), strict=True) if used_ranges else ((), ())
        gaps = zip((0, *ends), (*starts, self.capacity_bytes), strict=True)
        self._ends = {start: end for start, end in gaps if start < end}
        self._starts = {end: start for start, end in self._ends.items()}
        self._heaps = {}
        self.free_bytes = sum(end - start for start, end in self._ends.items())

    def check(self, used_ranges: Seq[tuple[int, int]]) -> None:
        """Raise IntegrityError unless `used_ranges` and the free ranges tile the arena exactly.

        Cost: O(ranges log ranges), and O(ranges) for each size of block.
        """
        position = 0
        for start, end in sorted([*used_ranges, *self._ends.items()]):
            if start != position:
                raise IntegrityError(
                    f"bytes [{position}, {start}) of the arena are {'lost' if start > position else 'owned twice'}"
                )
            position = end
        if position != self.capacity_bytes:
            raise IntegrityError(f"the arena's ranges end at byte {position}, its capacity is {self.capacity_bytes}")
        names = {
            side: {-end if side else start: end - start for start, end in self._ends.items()} for side in (False, True)
        }
        named = {key: frozenset(heap) for key, heap in self._heaps.items()}
        lost = list[int]()
        for (size, side), own in named.items():
            lost += [name for name, length in names[side].items() if length >= size and name not in own]
        if lost or self._starts != {end: start for start, end in self._ends.items()}:
            raise IntegrityError(f"the arena's free ranges contradict each other, or cannot be found: {lost}")
        n_free = sum(end - start for start, end in self._ends.items())
        if self.free_bytes != n_free:
            raise IntegrityError(f"the arena counts {self.free_bytes} free bytes, its free ranges hold {n_free}")
