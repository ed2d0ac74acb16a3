"""One budget of bytes for blocks of every kind.

The arena is one address space. Pages are taken from its low end, states and tails from its high end, each at its natural
size, lowest (highest) free address first; so the split between kinds follows demand, nothing is padded, moved or sized ahead.

The bookkeeping half (`Arena`, `BlockPool`) knows no tensors; `Store` holds the bytes.
"""

from __future__ import annotations

import itertools
import math
import mmap
import re
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush

import numpy as np
import torch
from torch import Tensor

from memory import uploads
from memory.block_layout import ALIGNMENT_BYTES, BlockLayout, Field
from memory.blocks.arrays import Int64s
from memory.errors import BUDGET_UNIT, CapacityError, IntegrityError, SpecError

_MOST_BYTES = 1 << 62
"""So that addresses stay within int64."""


def read_budget(budget: float | str, option: str = "budget") -> int:
    """Bytes of a budget given as a number of bytes or as text: "512MiB", "1.5 GB", "80g".

    K, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024, in capitals or not; the B may be left out.

    Args:
        option: what the caller calls it, for messages.
    """
    wanted: float = 0
    if isinstance(budget, int | float | np.integer | np.floating) and not isinstance(budget, bool):
        wanted = budget.item() if isinstance(budget, np.generic) else budget
        if math.isfinite(wanted) and wanted != int(wanted):
            raise SpecError(f"{option}={budget!r}; give a whole number of bytes, or text such as '2.5GiB'")
    elif isinstance(budget, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", budget, re.ASCII | re.I)):
        number, prefix, binary = match.groups()
        wanted = float(number) * (1024 if binary else 1000) ** " kmgt".index((prefix or " ").lower())
    if 1 <= wanted <= _MOST_BYTES:
        return int(wanted)
    most = f" of at most {_MOST_BYTES:,}" if _MOST_BYTES < wanted < math.inf else ""
    raise SpecError(f"{option}={budget!r}; give a positive number of bytes{most}, or text such as '512MiB' or '1GB'")


class Arena:
    """Which byte ranges of [0, capacity_bytes) are free, coalesced.

    Ranges are found by either end, so that neighbours join at once. For each size and side asked for, a heap says where the first range
    lies that is long enough; it may also name ranges that are no more, which are passed over when they come up.

    Args:
        unit: what refusals count: `CapacityError.unit`.
    """

    def __init__(self, capacity_bytes: int, unit: str = BUDGET_UNIT) -> None:
        self.unit = unit
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.free_bytes = 0
        self._ends: dict[int, int] = {}  # of free ranges, by their starts
        self._starts: dict[int, int] = {}  # and the other way round
        self._heaps: dict[tuple[int, bool], list[int]] = {}  # (size, from_top) -> starts, or negative ends
        if self.capacity_bytes:
            self.free(0, self.capacity_bytes)

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - self.free_bytes

    def allocate(self, n_bytes: int, *, from_top: bool) -> int | None:
        """Address of `n_bytes` (a multiple of ALIGNMENT_BYTES), or None if no free range is that long. Cost: as `allocate_many`."""
        return next(iter(self.allocate_many(1, n_bytes, from_top=from_top)), None)

    def allocate_many(self, n: int, n_bytes: int, *, from_top: bool) -> list[int]:
        """Addresses of `n` blocks of `n_bytes` each, or of as many as fit, each at the first place where it does.

        Cost: O(log free ranges) for each range that they are taken from.
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

    def free(self, start: int, n_bytes: int) -> None:
        """Give a range back. Cost: O(log free ranges)."""
        end = start + n_bytes
        low, high = self._starts.pop(start, start), self._ends.pop(end, end)
        self._ends[low], self._starts[high] = high, low
        self._enlist(low, start - low, high - low, from_top=False)
        self._enlist(-high, high - end, high - low, from_top=True)
        self.free_bytes += n_bytes

    def _enlist(self, name: int, bytes_before: int, bytes_now: int, from_top: bool) -> None:
        """A range of this name has grown: it is long enough for more sizes."""
        for (n_bytes, side), heap in self._heaps.items():
            if side == from_top and bytes_before < n_bytes <= bytes_now:
                heappush(heap, name)

    def _named(self, name: int, from_top: bool) -> tuple[int, int]:
        """The free range of this name in a heap; an empty one if it is no more."""
        return (self._starts.get(-name, -name), -name) if from_top else (name, self._ends.get(name, name))

    def _heap(self, n_bytes: int, from_top: bool) -> list[int]:
        """Names of all free ranges that are long enough, and not many more. Cost: O(1), amortised."""
        heap = self._heaps.get((n_bytes, from_top))
        if heap is None or len(heap) > 2 * len(self._ends) + 64:
            heap = [-end if from_top else start for start, end in self._ends.items() if end - start >= n_bytes]
            heapify(heap)
            self._heaps[n_bytes, from_top] = heap
        return heap

    def check(self, used_ranges: Seq[tuple[int, int]]) -> None:
        """Raise IntegrityError unless `used_ranges` and the free ranges tile the arena exactly.

        Cost: to sort the ranges, and to look at each of them once for each size of block.
        """
        position = 0
        for start, end in sorted([*used_ranges, *self._ends.items()]):
            if start != position:
                raise IntegrityError(f"bytes [{position}, {start}) of the arena are {'lost' if start > position else 'owned twice'}")
            position = end
        if position != self.capacity_bytes:
            raise IntegrityError(f"the arena's ranges end at byte {position}, its capacity is {self.capacity_bytes}")
        names = {side: {-end if side else start: end - start for start, end in self._ends.items()} for side in (False, True)}
        named = {key: frozenset(heap) for key, heap in self._heaps.items()}
        lost = [n for (size, side), own in named.items() for n, length in names[side].items() if length >= size and n not in own]
        if lost or self._starts != {end: start for start, end in self._ends.items()}:
            raise IntegrityError(f"the arena's free ranges contradict each other, or cannot be found: {lost}")
        n_free = sum(end - start for start, end in self._ends.items())
        if self.free_bytes != n_free:
            raise IntegrityError(f"the arena counts {self.free_bytes} free bytes, its free ranges hold {n_free}")


def _runs(block_bytes: int, *addresses: Int64s) -> Iterator[tuple[int, int, list[int]]]:
    """(first, end, addresses) of blocks [first, end) that lie one behind the other everywhere: what was allocated together mostly does."""
    if len(addresses[0]) == 1:
        yield 0, 1, [int(of[0]) for of in addresses]
        return
    breaks = [(of[1:] - of[:-1] != block_bytes).nonzero()[0] + 1 for of in addresses]
    bounds = sorted({0, *np.concatenate(breaks).tolist(), len(addresses[0])})
    for first, end in itertools.pairwise(bounds):
        yield first, end, [int(of[first]) for of in addresses]


_FEW = 8
"""Blocks that are counted one by one in less time than together."""


class BlockPool:
    """Reference-counted blocks of one size in an arena. A block is written only while its count is 1.

    Attributes:
        addresses: (n_ids,) byte address of each block; meaningless for ids not in use.
        counts: (n_ids,) references to each block, 0 when free.
    """

    def __init__(self, arena: Arena, name: str, block_bytes: int, *, from_top: bool, on_change: Callable[[int, int], None]) -> None:
        self.name = name
        self.block_bytes = block_bytes
        self.n_used = 0
        self.addresses = np.zeros(16, np.int64)
        self.counts = np.zeros(16, np.int64)
        self._arena = arena
        self._from_top = from_top
        self._on_change = on_change
        self._free_ids = list(range(15, -1, -1))

    @property
    def used_bytes(self) -> int:
        return self.n_used * self.block_bytes

    def allocate(self, n: int) -> Int64s:
        """`n` fresh blocks with one reference each: ids (n,). Raises CapacityError and takes none if they do not fit."""
        addresses = self._arena.allocate_many(n, self.block_bytes, from_top=self._from_top)
        if len(addresses) < n:
            for address in addresses:
                self._arena.free(address, self.block_bytes)
            raise CapacityError.of(f"{n} x {self.name} need", n * self.block_bytes, self._arena.free_bytes, self._arena.unit)
        ids = np.array(self._take_ids(n), np.int64)
        self.addresses[ids], self.counts[ids] = addresses, 1
        self.n_used += n
        for first, end, (start,) in _runs(self.block_bytes, np.sort(self.addresses[ids])):
            self._on_change(start, (end - first) * self.block_bytes)
        return ids

    def retain(self, ids: Int64s) -> None:
        """One more reference to each block; an id may occur several times."""
        if len(ids) > _FEW:
            np.add.at(self.counts, ids, 1)
        else:
            for block in ids.tolist():
                self.counts[block] += 1

    def release(self, ids: Int64s) -> None:
        """One reference less to each block; blocks without any are freed."""
        if len(ids) > _FEW:
            np.subtract.at(self.counts, ids, 1)
            freed: list[int] = np.unique(ids[self.counts[ids] == 0]).tolist()
        else:
            freed = []
            for block in ids.tolist():
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

    def used_ranges(self) -> list[tuple[int, int]]:
        starts = self.addresses[self.counts > 0].tolist()
        return [(start, start + self.block_bytes) for start in starts]

    def check(self, references: Int64s) -> None:
        """Raise IntegrityError unless `references`, one id for each reference held anywhere, matches the counts."""
        if len(references) and not 0 <= references.min() <= references.max() < len(self.counts):
            raise IntegrityError(f"{self.name} block ids {references.min()} ... {references.max()} are held, {len(self.counts)} exist")
        expected = np.bincount(references, minlength=len(self.counts))
        wrong = np.flatnonzero(expected != self.counts)
        if len(wrong):
            block = int(wrong[0])
            raise IntegrityError(f"{self.name} block {block} counts {self.counts[block]} references, {expected[block]} are held")
        if sorted(self._free_ids) != np.flatnonzero(self.counts == 0).tolist():
            raise IntegrityError(f"{self.name} blocks are free and in use at once, or neither")
        if self.n_used != int((self.counts > 0).sum()):
            raise IntegrityError(f"{self.name} counts {self.n_used} blocks in use, {int((self.counts > 0).sum())} are")

    def _take_ids(self, n: int) -> list[int]:
        while len(self._free_ids) < n:
            n_ids = len(self.counts)
            self.addresses, self.counts = (np.concatenate([column, np.zeros(n_ids, np.int64)]) for column in (self.addresses, self.counts))
            self._free_ids[:0] = range(2 * n_ids - 1, n_ids - 1, -1)
        left = len(self._free_ids) - n
        taken = self._free_ids[left:][::-1]
        del self._free_ids[left:]
        return taken


_mappings: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Address -> what `reserve` has mapped there, as long as a tensor of it lives."""


def reserve(n_bytes: int, device: torch.device) -> Tensor:
    """(n_bytes,) uint8, of any content. On the CPU, bytes that are never touched take no memory.

    Linux is asked for large pages: what a step touches first then costs one page fault in 2 MiB instead of one in 4 KiB.
    """
    if n_bytes and device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        mapped = torch.frombuffer(pages, dtype=torch.uint8)
        _mappings[mapped.data_ptr()] = pages
        return mapped
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


class Store:
    """An arena with its bytes: one tensor on the device, none at all on "meta".

    Args:
        reserve: (bytes, device) -> that tensor, uint8; what the device has unless given.
        unit: of the arena.
        poison: fill every block with NaN when it is handed out and when it is freed, so that reading memory nobody wrote
            shows at once. For tests: it costs a write of every block.
    """

    def __init__(
        self,
        capacity_bytes: int,
        device: torch.device,
        *,
        poison: bool,
        reserve: Callable[[int, torch.device], Tensor] = reserve,
        unit: str = BUDGET_UNIT,
    ) -> None:
        self.arena = Arena(capacity_bytes, unit)
        self.device = device
        self.stages = uploads.Stages(device)
        self.is_dry = device.type == "meta"
        self._poison = poison and not self.is_dry
        try:
            with torch.inference_mode(False):  # or the bytes could be written inside of inference mode only
                self._bytes = reserve(0 if self.is_dry else self.arena.capacity_bytes, torch.device("cpu") if self.is_dry else device)
        except (RuntimeError, AssertionError, OSError) as error:
            raise SpecError(f"{device} cannot hold a budget of {capacity_bytes:,} {unit}; choose a smaller one") from error
        if self._poison:
            self._bytes.fill_(0xFF)

    def give_back(self) -> None:
        """Nobody uses the bytes any more: they go now, whatever still refers to them, such as the frames of a traceback."""
        if self.device.type == "cuda":
            self._bytes.untyped_storage().resize_(0)
        elif (pages := _mappings.get(self._bytes.data_ptr())) is not None:
            pages.madvise(mmap.MADV_DONTNEED)

    def flat(self, field: Field) -> Tensor:
        """All bytes as a flat tensor of the field's dtype, from the field's place in a block at address 0 on.

        In it, element i of that field in the block at address a is element a // itemsize + i.
        """
        return self._bytes.view(field.dtype)[field.offset_bytes // field.dtype.itemsize :]

    def make_pool(self, name: str, layout: BlockLayout, *, from_top: bool) -> BlockPool:
        return BlockPool(self.arena, name, layout.block_bytes, from_top=from_top, on_change=self._poison_block)

    def upload(self, array: Int64s, *, room: bool = False) -> Tensor:
        """A plan's array where the kernels want it: `memory.uploads`."""
        return uploads.upload(array, self.device, room=room)

    def copy(self, source: int, target: int, n_bytes: int) -> None:
        """Copy one block's bytes onto another's."""
        if not self.is_dry:
            self._bytes[target : target + n_bytes] = self._bytes[source : source + n_bytes]

    def read(self, addresses: Int64s, block_bytes: int) -> Tensor:
        """Copies of blocks, (n, block_bytes) uint8 on the host; in a dry run on "meta"."""
        if self.is_dry:
            return torch.empty(len(addresses), block_bytes, dtype=torch.uint8, device="meta")
        blocks = torch.empty(len(addresses), block_bytes, dtype=torch.uint8)
        for first, end, (address,) in _runs(block_bytes, addresses):
            blocks[first:end].view(-1).copy_(self._bytes[address : address + (end - first) * block_bytes])
        return blocks

    def write(self, addresses: Int64s, blocks: Tensor) -> None:
        """Put what `read` returned into other blocks."""
        if not self.is_dry:
            n_bytes = blocks.shape[1]
            for first, end, (address,) in _runs(n_bytes, addresses):
                self._bytes[address : address + (end - first) * n_bytes] = blocks[first:end].view(-1)

    def fetch(self, source: Store, addresses: Int64s, targets: Int64s, block_bytes: int) -> None:
        """Copy blocks of another store into own ones (n,). The host waits unless both are of one CUDA device."""
        if not self.is_dry:
            for first, end, (address, target) in _runs(block_bytes, addresses, targets):
                n_bytes = (end - first) * block_bytes
                self._bytes[target : target + n_bytes].copy_(source._bytes[address : address + n_bytes])

    def _poison_block(self, address: int, n_bytes: int) -> None:
        """All bits set is NaN in every floating-point dtype."""
        if self._poison:
            self._bytes[address : address + n_bytes].fill_(0xFF)
