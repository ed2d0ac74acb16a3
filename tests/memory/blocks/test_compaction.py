"""Blocks that are moved together keep their bytes and ids, and no more of them move than must."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridmem.memory.blocks import compaction
from hybridmem.memory.blocks.arrays import EMPTY, Int64s
from hybridmem.memory.blocks.compaction import cheapest_region, compact
from hybridmem.memory.blocks.layout import ALIGNMENT_BYTES, BlockLayout
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.blocks.store import Store

UNIT = ALIGNMENT_BYTES
CPU, META = torch.device("cpu"), torch.device("meta")


class Filled:
    """Is a store with blocks of three sizes, each filled with a number of its own. Some of them were freed."""

    def __init__(self, n_units: int, kinds: list[int], freed: list[bool], *, device: torch.device = CPU) -> None:
        self.store = Store(n_units * UNIT, device, poison=True)
        sizes = (1, 3, 7)
        self.pools = [
            self.store.make_pool(f"{n} units", BlockLayout((), n * UNIT), from_top=n > 1) for n in sizes
        ]  # fmt: skip
        self.held: list[tuple[BlockPool, Int64s]] = []
        self.store.journal.rebuild = lambda: self.store.rebuild(
            {pool: [ids for owner, ids in self.held if owner is pool] for pool in self.pools}
        )
        for kind in kinds:
            if sizes[kind] * UNIT <= self.store.arena.free_bytes:
                self.held.append((self.pools[kind], self.pools[kind].allocate(1)))
        for is_freed, (pool, ids) in zip(freed, [*self.held], strict=False):
            if is_freed:
                pool.release(ids)
                self.held.remove((pool, ids))
        for number, (pool, ids) in enumerate(self.held):
            self.store.write(pool.addresses[ids], torch.full((1, pool.block_bytes), number, dtype=torch.uint8))

    def check(self) -> None:
        """Assert that every block has its bytes, free bytes are poisoned, and the arena knows which are free."""
        for number, (pool, ids) in enumerate(self.held):
            assert (self.store.read(pool.addresses[ids], pool.block_bytes) == number).all()
        for start, end in zip(*(ends.tolist() for ends in self.store.arena.free_ranges()), strict=True):
            assert (self.store.read(np.array([start]), end - start) == 0xFF).all()
        self.store.arena.check([used for pool in self.pools for used in pool.used_ranges()])


uses = (st.integers(20, 90), st.lists(st.integers(0, 2), min_size=5, max_size=60), st.lists(st.booleans(), max_size=60))


@given(*uses, st.integers(1, 30), st.sampled_from([0, UNIT, 1 << 22]))
def test_blocks_keep_their_bytes_and_one_free_range_is_large_enough(
    n_units: int, kinds: list[int], freed: list[bool], n_asked: int, scratch_bytes: int
) -> None:
    filled = Filled(n_units, kinds, freed)
    free_bytes = filled.store.arena.free_bytes
    starts, ends = filled.store.arena.free_ranges()
    region = cheapest_region(filled.store, n_asked * UNIT, EMPTY)
    if region is None:
        assert free_bytes < n_asked * UNIT or (ends - starts).max() >= n_asked * UNIT
        return
    # This is the bound that the module promises, for free ranges that are each too short.
    used_bytes = filled.store.arena.used_bytes
    assert region.used_bytes <= 2 * n_asked * UNIT * used_bytes / (free_bytes - n_asked * UNIT or 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "_SCRATCH_BYTES", scratch_bytes)
        compact(filled.store, filled.pools, region)
    filled.check()
    starts, ends = filled.store.arena.free_ranges()
    assert (ends - starts).max() >= n_asked * UNIT and filled.store.arena.free_bytes == free_bytes


@given(*uses, st.integers(1, 30), st.sets(st.integers(0, 59)))
def test_fixed_blocks_stay(
    n_units: int, kinds: list[int], freed: list[bool], n_asked: int, fixed: set[int]
) -> None:  # fmt: skip
    filled = Filled(n_units, kinds, freed)
    pinned = [(pool, int(pool.addresses[ids][0]), ids) for i, (pool, ids) in enumerate(filled.held) if i in fixed]
    region = cheapest_region(filled.store, n_asked * UNIT, np.array([at for _, at, _ in pinned], np.int64))
    if region is not None:
        compact(filled.store, filled.pools, region)
    filled.check()
    assert [int(pool.addresses[ids][0]) for pool, _, ids in pinned] == [at for _, at, _ in pinned]


@pytest.mark.parametrize("which", ["put", "copy"])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_move_that_is_interrupted_has_happened_or_not(which: str, is_done: bool) -> None:
    """The interrupt comes before or after each change of the bytes, at any move.

    The distance of the move is smaller or larger than the block.
    """
    for n in itertools.count():
        filled, calls = Filled(23, [0, 2, 0, 1, 2, 0, 1], [True, False, False, True]), 0
        with pytest.MonkeyPatch.context() as patch:
            original = getattr(Store, which)

            def interrupted(*arguments: object) -> None:
                nonlocal calls
                calls += 1
                if is_done or calls - 1 != n:  # noqa: B023
                    original(*arguments)  # noqa: B023
                if calls - 1 == n:  # noqa: B023
                    raise KeyboardInterrupt

            region = cheapest_region(filled.store, filled.store.arena.free_bytes, EMPTY)
            assert region is not None
            patch.setattr(Store, which, interrupted)
            patch.setattr(compaction, "_SCRATCH_BYTES", 0)
            try:
                compact(filled.store, filled.pools, region)
            except KeyboardInterrupt:
                assert calls > n
        filled.check()
        if calls <= n:
            assert n
            return


def test_a_dry_run_moves_as_the_real_one_does() -> None:
    kinds, freed = [0, 2, 0, 1, 2, 0, 1, 0, 0], [True, False, False, True, False, True]
    real, dry = Filled(25, kinds, freed), Filled(25, kinds, freed, device=META)
    for each in (real, dry):
        region = cheapest_region(each.store, 5 * UNIT, EMPTY)
        assert region is not None
        compact(each.store, each.pools, region)
    for one, two in zip(real.pools, dry.pools, strict=True):
        assert one.addresses.tolist() == two.addresses.tolist()
