"""The arena is compared with a plain model: ranges never overlap, and all bytes come back as one range."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridmem.memory import CapacityError, IntegrityError, SpecError
from hybridmem.memory.blocks.arena import Arena, read_budget
from hybridmem.memory.blocks.layout import ALIGNMENT_BYTES, BlockLayout, Field
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.blocks.store import Store
from tests.counting import Calls
from tests.inside import free_ranges

UNIT = ALIGNMENT_BYTES
ONE_UNIT = BlockLayout((), UNIT)
CPU = torch.device("cpu")


def make_pool(arena: Arena, n_units: int, *, from_top: bool = False, name: str = "pages") -> BlockPool:
    return BlockPool(arena, name, n_units * UNIT, from_top=from_top, on_change=lambda address, n_bytes: None)


# The tests below use the arena at random.


def first_places(used: list[tuple[int, int]], capacity: int, n: int, n_bytes: int, *, from_top: bool) -> list[int]:
    """Return where `n` blocks are placed: each at the lowest (highest) free address where it fits."""
    bounds = [0, *itertools.chain(*used), capacity][:: -1 if from_top else 1]
    places = list[int]()
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        places += range(start - n_bytes, end - 1, -n_bytes) if from_top else range(start, end - n_bytes + 1, n_bytes)
    return places[:n]


class Model:
    """Holds three pools, and what a plain dictionary says about them: (pool, block) -> references."""

    def __init__(self, capacity_units: int) -> None:
        self.arena = Arena(capacity_units * UNIT)
        self.pools = [
            make_pool(self.arena, 1),
            make_pool(self.arena, 3, from_top=True),
            make_pool(self.arena, 2, from_top=True),
        ]
        self.counts: dict[tuple[int, int], int] = {}

    def allocate(self, which: int, n: int) -> None:
        pool, free_before, used_before = self.pools[which], self.arena.free_bytes, self.used_ranges()
        try:
            ids = pool.allocate(n)
        except CapacityError as error:
            assert (error.needed, error.free, error.unit) == (n * pool.block_bytes, free_before, "bytes")
            assert self.used_ranges() == used_before, "a refused allocation took something"
            return
        assert len(set(ids.tolist())) == n
        assert pool.addresses[ids].tolist() == first_places(
            used_before, self.arena.capacity_bytes, n, pool.block_bytes, from_top=which > 0
        )
        for block in ids.tolist():
            assert (which, block) not in self.counts, "a block in use was handed out"
            self.counts[which, block] = 1

    def change(self, choice: int, by: int) -> None:
        """Add or remove one reference to one of the blocks in use."""
        if not self.counts:
            return
        key = sorted(self.counts)[choice % len(self.counts)]
        pool, ids = self.pools[key[0]], np.array([key[1]])
        pool.retain(ids) if by > 0 else pool.release(ids)
        self.counts[key] += by
        if self.counts[key] == 0:
            del self.counts[key]

    def used_ranges(self) -> list[tuple[int, int]]:
        return sorted(r for pool in self.pools for r in pool.used_ranges())

    def check(self) -> None:
        for which, pool in enumerate(self.pools):
            held = [block for (owner, block), n in self.counts.items() if owner == which for _ in range(n)]
            pool.check([np.array(held, np.int64)])
            assert pool.n_used == len(set(held)) and pool.used_bytes == pool.n_used * pool.block_bytes
        used = self.used_ranges()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(used)), "blocks overlap"
        assert self.arena.used_bytes == sum(end - start for start, end in used)
        self.arena.check(used)


operations = st.one_of(
    st.tuples(st.just("allocate"), st.integers(0, 2), st.integers(0, 6)),
    st.tuples(st.just("change"), st.integers(0, 99), st.sampled_from([1, -1, -1])),
)


@given(st.integers(0, 40), st.lists(operations, max_size=60))
def test_any_use_agrees_with_a_plain_model(capacity_units: int, use: list[tuple[str, int, int]]) -> None:
    model = Model(capacity_units)
    for operation, first, second in use:
        getattr(model, operation)(first, second)
        model.check()
    while model.counts:
        model.change(0, -1)
    model.check()
    assert model.arena.free_bytes == capacity_units * UNIT
    if capacity_units:
        assert model.arena.allocate(capacity_units * UNIT, from_top=False) == 0, (
            "the free ranges did not become one again"
        )


def test_a_place_is_found_without_passing_over_what_is_too_short() -> None:
    """With four times as many holes, a search makes no more calls."""

    def n_calls(n_holes: int) -> int:
        arena = Arena(4 * n_holes * UNIT)
        small, large = make_pool(arena, 1, from_top=True), make_pool(arena, 2, from_top=True)
        ids = small.allocate(2 * n_holes)
        small.release(ids[::2])

        def use() -> None:
            for _ in range(20):
                large.release(large.allocate(3))
                small.release(small.allocate(3))

        use()
        with Calls() as calls:
            use()
        return calls.n

    assert n_calls(1000) <= 1.1 * n_calls(250)


# The tests below are about blocks.


def test_pages_come_from_the_bottom_and_states_from_the_top() -> None:
    arena = Arena(10 * UNIT)
    pages, states = make_pool(arena, 1), make_pool(arena, 2, from_top=True)
    ids = pages.allocate(2)
    assert pages.addresses[ids].tolist() == [0, UNIT]
    assert states.addresses[states.allocate(2)].tolist() == [8 * UNIT, 6 * UNIT]
    pages.release(ids[:1])
    assert pages.addresses[pages.allocate(1)].tolist() == [0], "the lowest free address is taken first"


def test_a_block_lives_until_its_last_reference_goes() -> None:
    pool = make_pool(Arena(4 * UNIT), 1)
    ids = pool.allocate(1)
    pool.retain(np.repeat(ids, 2))
    assert pool.counts[ids].tolist() == [3]
    pool.release(np.repeat(ids, 2))
    assert pool.n_used == 1
    pool.release(ids)
    assert pool.n_used == 0 and pool.used_ranges() == []


def test_a_pool_grows_beyond_its_first_ids() -> None:
    pool = make_pool(Arena(100 * UNIT), 1)
    ids = pool.allocate(100)
    assert sorted(ids.tolist()) == list(range(100)) and sorted(pool.addresses[ids].tolist()) == list(
        range(0, 100 * UNIT, UNIT)
    )


def test_what_does_not_fit_is_refused_as_a_whole() -> None:
    arena = Arena(5 * UNIT)
    pool = make_pool(arena, 2)
    with pytest.raises(CapacityError, match="3 x pages need 384 bytes; 320 are free") as caught:
        pool.allocate(3)
    assert (caught.value.needed, caught.value.free, caught.value.unit) == (384, 320, "bytes")
    assert pool.n_used == 0 and arena.free_bytes == 5 * UNIT
    assert len(pool.allocate(2)) == 2


def test_a_refusal_says_when_the_free_bytes_lie_apart() -> None:
    arena = Arena(5 * UNIT)
    small, large = make_pool(arena, 1), make_pool(arena, 2)
    ids = small.allocate(5)
    small.release(ids[[0, 2, 4]])
    with pytest.raises(CapacityError, match="not in pieces large enough") as caught:
        large.allocate(1)
    assert (caught.value.needed, caught.value.free) == (2 * UNIT, 3 * UNIT)


def test_a_capacity_is_rounded_down_to_whole_lines() -> None:
    assert Arena(3 * UNIT + UNIT - 1).capacity_bytes == 3 * UNIT
    assert Arena(UNIT - 1).allocate(UNIT, from_top=False) is None


# The tests below are about `check()`.


@pytest.mark.parametrize("references", [[], [0, 0], [0, 1]])
def test_check_finds_a_wrong_count(references: list[int]) -> None:
    pool = make_pool(Arena(4 * UNIT), 1)
    assert pool.allocate(1).tolist() == [0]
    pool.check([np.array([0])])
    with pytest.raises(IntegrityError, match="pages block"):
        pool.check([np.array(references, np.int64)])


def test_check_finds_a_block_that_is_free_and_in_use() -> None:
    pool = make_pool(Arena(4 * UNIT), 1)
    pool.allocate(1)
    pool.counts[5] = 1
    with pytest.raises(IntegrityError, match="in use at once"):
        pool.check([np.array([0, 5])])


@pytest.mark.parametrize(
    "ranges, message",
    [
        ([], "lost"),
        ([(0, UNIT)], "lost"),
        ([(0, 2 * UNIT), (0, UNIT)], "owned twice"),
        ([(0, 3 * UNIT)], "owned twice"),
        ([(0, 2 * UNIT), (4 * UNIT, 5 * UNIT)], "end at byte"),
    ],
)
def test_check_finds_lost_and_doubled_ranges(ranges: list[tuple[int, int]], message: str) -> None:
    arena = Arena(4 * UNIT)
    assert arena.allocate(2 * UNIT, from_top=False) == 0
    arena.check([(0, 2 * UNIT)])
    with pytest.raises(IntegrityError, match=message):
        arena.check(ranges)


# The tests below are about budgets.


class Counted(int):
    """Is an address that counts how often it, or one made from it, is compared with another."""

    n_compared = 0

    def __add__(self, other: int) -> Counted:
        return Counted(int(self) + other)

    def __neg__(self) -> Counted:
        return Counted(-int(self))

    def __eq__(self, other: object) -> bool:
        Counted.n_compared += 1
        return int(self) == other

    __hash__ = int.__hash__


@pytest.mark.parametrize("spoilt", ["heaps", "starts"])
def test_check_finds_free_ranges_that_are_not_found(spoilt: str) -> None:
    """One of them is exactly as long as a block."""
    arena = Arena(4 * UNIT)
    places = arena.allocate_many(4, UNIT, from_top=False)
    arena.free(places[1], UNIT)
    used = [(at, at + UNIT) for at in places if at != places[1]]
    arena.check(used)
    starts, heaps = free_ranges(arena)
    for entries in heaps if spoilt == "heaps" else [starts]:
        entries.clear()
    with pytest.raises(IntegrityError, match="cannot be found"):
        arena.check(used)


def test_blocks_of_a_new_size_come_to_lie_at_the_lowest_place_whatever_was_freed_last() -> None:
    arena = Arena(32 * UNIT)
    places = arena.allocate_many(32, UNIT, from_top=False)
    for i in (20, 4, 28, 12, 8, 24, 16, 0):
        arena.free(places[i], 2 * UNIT)
    assert [arena.allocate(2 * UNIT, from_top=False) for _ in range(8)] == [places[i] for i in range(0, 32, 4)]


def test_the_largest_budget_is_named_to_those_who_want_more() -> None:
    assert read_budget(1) == 1 and read_budget(1 << 62) == 1 << 62
    for budget, is_named in ((1 << 63, True), (0, False), (float("inf"), False)):
        with pytest.raises(SpecError) as refused:
            read_budget(budget)
        assert ("at most 4,611,686,018,427,387,904" in str(refused.value)) is is_named


def test_a_check_looks_at_each_free_range_once() -> None:
    found = []
    for n_ranges in (200, 400):
        arena = Arena(2 * n_ranges * UNIT)
        arena.allocate_many(n_ranges, UNIT, from_top=False)
        arena.allocate_many(n_ranges, UNIT, from_top=True)  # Now each kind of heap exists.
        for start in range(0, 2 * n_ranges, 2):
            arena.free(Counted(start * UNIT), UNIT)
        Counted.n_compared = 0
        arena.check([(start * UNIT, (start + 1) * UNIT) for start in range(1, 2 * n_ranges, 2)])
        found.append(Counted.n_compared)
    assert found[1] <= 2 * found[0] + 100, "comparisons grow faster than ranges"


@pytest.mark.parametrize(
    "budget, n_bytes",
    [
        (1, 1),
        (10**12, 10**12),
        ("3B", 3),
        ("2kB", 2000),
        ("1 KiB", 1024),
        ("512MiB", 512 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("  80GiB ", 80 * 2**30),
        ("0.5TiB", 2**39),
        ("1024", 1024),
        ("1G", 10**9),
        ("2gb", 2 * 10**9),
        ("1Gi", 2**30),
        (1.5e9, 1_500_000_000),
        (np.int64(4096), 4096),
        (np.float32(4096), 4096),
    ],
)
def test_budgets_are_read(budget: int | str, n_bytes: int) -> None:
    assert read_budget(budget) == n_bytes


NO_BUDGETS = [
    0,
    -1,
    True,
    1.5,
    None,
    "",
    "GiB",
    "-1GB",
    "1e9B",
    "1GiBs",
    "1,5GB",
    "1iB",
    "0GB",
    "0.4B",
    np.bool_(True),
    np.float32("nan"),
]


@pytest.mark.parametrize("budget", NO_BUDGETS)
def test_budgets_that_are_none_are_refused(budget: object) -> None:
    with pytest.raises(SpecError, match="budget="):
        read_budget(budget)  # type: ignore[arg-type]


# The tests below are about layouts and bytes.


def test_fields_start_at_whole_lines() -> None:
    layout = BlockLayout.of([((3, 5), torch.float32), ((2,), torch.bfloat16), ((16,), torch.float32)])
    assert [f.offset_bytes for f in layout.fields] == [0, 64, 128]
    assert [f.n_elements for f in layout.fields] == [15, 2, 16]
    assert layout.block_bytes == 192 and layout.padding_bytes == 192 - 60 - 4 - 64
    assert BlockLayout.of([]) == BlockLayout((), 0)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 9), max_size=3).map(tuple), st.sampled_from([torch.float32, torch.bfloat16])),
        min_size=1,
    )
)
def test_no_layout_lets_fields_overlap(tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    layout = BlockLayout.of(tensors)
    starts = [f.offset_bytes for f in layout.fields]
    ends = [f.offset_bytes + f.n_elements * f.dtype.itemsize for f in layout.fields]
    assert all(start % ALIGNMENT_BYTES == 0 for start in [*starts, layout.block_bytes])
    assert all(
        end <= start < end + ALIGNMENT_BYTES for end, start in zip(ends, [*starts[1:], layout.block_bytes], strict=True)
    )


def test_a_flat_finds_a_field_in_every_block() -> None:
    store = Store(4 * UNIT, CPU, poison=False)
    layout = BlockLayout.of([((4,), torch.float32), ((8,), torch.bfloat16)])
    pool = store.make_pool("states", layout, from_top=True)
    first, second = layout.fields
    for address in pool.addresses[pool.allocate(2)].tolist():
        store.flat(first)[address // 4 :][:4] = address
        store.flat(second)[address // 2 :][:8] = address + 1
    everything = Field(0, (UNIT,), torch.float32)
    assert store.flat(everything)[:4].tolist() == [0] * 4 and store.flat(everything)[32:36].tolist() == [128] * 4
    assert store.flat(second)[64:72].tolist() == [129] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison_is_nan_when_handed_out_and_when_freed(dtype: torch.dtype) -> None:
    store, n_elements = Store(4 * UNIT, CPU, poison=True), UNIT // dtype.itemsize
    flat, pool = store.flat(Field(0, (n_elements,), dtype)), store.make_pool("pages", ONE_UNIT, from_top=False)
    assert flat.isnan().all()
    flat.zero_()
    ids = pool.allocate(2)
    assert flat[: 2 * n_elements].isnan().all() and not flat[2 * n_elements :].isnan().any()
    flat.zero_()
    pool.release(ids[:1])
    assert flat[:n_elements].isnan().all() and not flat[n_elements:].isnan().any()


def test_without_poison_nothing_is_filled() -> None:
    store = Store(UNIT, CPU, poison=False)
    flat, pool = store.flat(Field(0, (16,), torch.float32)), store.make_pool("pages", ONE_UNIT, from_top=False)
    flat.fill_(3)
    pool.release(pool.allocate(1))
    assert (flat == 3).all()


def test_a_copied_block_has_the_same_bytes() -> None:
    store = Store(3 * UNIT, CPU, poison=True)
    flat = store.flat(Field(0, (16,), torch.float32))
    flat[:16] = torch.arange(16.0)
    store.copy(0, 2 * UNIT, UNIT)
    assert flat[32:].tolist() == flat[:16].tolist() and flat[16:32].isnan().all()


def test_a_dry_store_keeps_books_and_holds_no_bytes() -> None:
    store = Store(2**60, torch.device("meta"), poison=True)
    pool = store.make_pool("pages", ONE_UNIT, from_top=False)
    pool.release(pool.allocate(3))
    store.copy(0, UNIT, UNIT)
    assert store.is_dry and store.arena.free_bytes == 2**60
    assert store.upload(np.arange(3)).tolist() == [0, 1, 2]


def test_a_budget_that_the_device_cannot_hold_is_refused() -> None:
    with pytest.raises(SpecError, match="cannot hold a budget"):
        Store(2**62, CPU, poison=False)
