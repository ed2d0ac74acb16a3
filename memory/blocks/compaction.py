"""Moves blocks together, so that the free ranges between them become one range that is large enough.

Tables refer to blocks by id, and only the pool knows the address of a block. So moving a block means copying its bytes
and changing one address. Blocks whose addresses an open step has read stay where they are.

Before any block moves, the region with the fewest bytes to move is chosen. Let U bytes be in use and F be free, and let
n bytes be asked for. Walk through the arena, and end a region whenever it has at least n free bytes. That gives at
least F / 2n regions, so one of them has at most 2n U / F bytes in use. So the cost grows with the bytes asked for, not
with the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s, starts_of
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.blocks.store import Store

_SCRATCH_BYTES = 1 << 22
"""How many bytes move at once if they move by less than their own length. Such bytes are copied twice."""


@dataclass(frozen=True)
class Region:
    """Is a byte range of the arena that begins and ends with free bytes.

    Attributes:
        used_bytes: how many bytes must move so that the free bytes become one range.
    """

    start: int
    end: int
    used_bytes: int


def cheapest_region(store: Store, n_bytes: int, fixed: Int64s) -> Region | None:
    """Find the region that has `n_bytes` free bytes and the fewest bytes in use.

    The region contains no block at one of the addresses `fixed`. Returns None if there is no such region, or if the
    region is a single free range already. Cost: O(free ranges log free ranges).
    """
    starts, ends = store.arena.free_ranges()
    passed = starts_of(ends - starts)
    last = passed[1:].searchsorted(passed[:-1] + n_bytes)
    first = (last < len(starts)).nonzero()[0]
    last = last[first]
    fixed = np.sort(fixed)
    is_whole = fixed.searchsorted(starts[first]) == fixed.searchsorted(ends[last])
    first, last = first[is_whole], last[is_whole]
    if not len(first):
        return None
    used_bytes = (ends[last] - starts[first]) - (passed[last + 1] - passed[first])
    best = int(used_bytes.argmin())
    if not used_bytes[best]:
        return None
    return Region(int(starts[first[best]]), int(ends[last[best]]), int(used_bytes[best]))


def compact(store: Store, pools: Sequence[BlockPool], region: Region) -> None:
    """Move all blocks of a region to its low end. After each move, every block is where its pool says.

    Cost: the region's bytes in use are copied once or twice, and O(ids).
    """
    found = [pool.within(region.start, region.end) for pool in pools]
    owners = np.repeat(np.arange(len(pools)), [len(ids) for ids in found])
    ids = np.concatenate(found)
    addresses = np.concatenate([pool.addresses[own] for pool, own in zip(pools, found, strict=True)])
    order = addresses.argsort()
    owners, ids, addresses = owners[order], ids[order], addresses[order]
    sizes = np.array([pool.block_bytes for pool in pools])[owners]
    distances = addresses - region.start - (sizes.cumsum() - sizes)
    for begin, end in _moves(addresses, sizes, distances):
        moved = {pool: ids[begin:end][owners[begin:end] == i] for i, pool in enumerate(pools)}
        n_bytes, distance = int(sizes[begin:end].sum()), int(distances[begin])
        _move(store, {pool: own for pool, own in moved.items() if len(own)}, int(addresses[begin]), n_bytes, distance)


def _moves(addresses: Int64s, sizes: Int64s, distances: Int64s) -> Iterator[tuple[int, int]]:
    """Yield the byte range [begin, end) of each group of neighbouring blocks that move together.

    All blocks up to the next free range move equally far.
    """
    breaks = (addresses[1:] != (addresses + sizes)[:-1]).nonzero()[0] + 1
    bounds = [0, *breaks.tolist(), len(addresses)]
    ends = addresses + sizes
    for begin, stop in itertools.pairwise(bounds):
        while begin < stop:
            most = max(int(distances[begin]), _SCRATCH_BYTES)
            end = int(ends[begin:stop].searchsorted(addresses[begin] + most, side="right")) + begin
            end = max(end, begin + 1)
            yield begin, end
            begin = end


def _move(store: Store, moved: dict[BlockPool, Int64s], source: int, n_bytes: int, distance: int) -> None:
    """Move neighbouring blocks down by `distance`, which is the length of the free range before them."""
    arena, journal, target, freed = store.arena, store.journal, source - distance, min(n_bytes, distance)
    with journal.change():
        arena.take(target, freed)
        # The target overlaps the source, so a direct copy would overwrite bytes before it reads them.
        if distance < n_bytes:
            saved = store.saved(source, n_bytes)
            journal.before(store.put, source, saved)
            store.put(target, saved)
        else:
            store.copy(source, target, n_bytes)
        for pool, ids in moved.items():
            addresses = pool.addresses[ids]
            journal.before(pool.addresses.put, ids, addresses)
            pool.addresses[ids] = addresses - distance
        journal.after(_free, store, source + n_bytes - freed, freed)


def _free(store: Store, start: int, n_bytes: int) -> None:
    store.arena.free(start, n_bytes)
    store.spoil(start, n_bytes)
