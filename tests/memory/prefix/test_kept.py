"""A prefix cache counts checkpoints to the token, the byte and the second, and leaves nothing when it is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from hybridmem.memory import BatchError, CapacityError, HybridMemory, SequenceError, SpecError
from hybridmem.memory.prefix import PrefixCache
from tests.toy import Toy

TOY = Toy()


def make(budget: int | str = "8MiB", **options: Any) -> HybridMemory:
    return HybridMemory(TOY.memory_spec, budget, rollback_window=4, device="meta", **options)


def insert(cache: PrefixCache, tokens: list[int], **options: Any) -> None:
    sequence, lookup = cache.open(tokens, options.get("owner"))
    cache.memory.run(None, {sequence: tokens[lookup.reused :]})
    cache.insert(sequence, **options)
    cache.memory.close(sequence)


def prompt(i: int) -> list[int]:
    return [i // 10, i % 10] * 10


def cached(cache: PrefixCache, n: int) -> list[int]:
    return [i for i in range(n) if cache.find([*prompt(i), 5]).reused == 20]


def test_tokens_of_prefixes_take_a_quarter_of_what_checkpoints_may() -> None:
    """Token ids may take a quarter of the budget and of the bytes outside.

    The cache uses all of that. With one prompt more, it closes a checkpoint.
    """
    for max_bytes in (0, 32 << 10):
        own = HybridMemory(Toy(attention=False).memory_spec, "64KiB", rollback_window=4, device="meta")
        cache = PrefixCache(own, max_bytes=max_bytes)
        most = (own.budget_bytes + max_bytes) // 4 // 16
        for i in range(most // 128 + 2):
            insert(cache, [i, *[18] * 127])
            fits = 128 * (i + 1) <= most
            assert cache.stats().book_bytes == 16 * (128 * (i + 1) if fits else most // 128 * 128)
            assert (cache.stats().n_evicted == 0) == fits


def test_a_checkpoint_lives_to_the_second() -> None:
    now = 0.0
    cache = PrefixCache(make(), seconds_to_live=10, now=lambda: now)
    insert(cache, prompt(0))
    insert(cache, prompt(1), seconds_to_live=4)
    now = 3.0
    cache.memory.close(cache.open([*prompt(0), 5])[0])
    cache.memory.close(cache.open([*prompt(1), 5])[0])
    for now, alive in ((6.75, [0, 1]), (7.0, [0]), (12.75, [0]), (13.0, [])):  # noqa: B007
        assert cached(cache, 2) == alive
    assert cache.stats().n_expired == 2 and cache.stats().n_checkpoints == 0
    insert(cache, prompt(2))
    now = 22.75
    assert cache.find([*prompt(2), 5]).reused == 20
    now = 23.0
    sequence, lookup = cache.open([*prompt(2), 5])
    cache.memory.close(sequence)
    assert lookup.reused == 0
    insert(cache, prompt(2))
    now = 33.0
    insert(cache, prompt(3))
    assert cache.stats().n_expired == 4, "what is inserted finds out as well"
    with pytest.raises(BatchError):
        cache.pin(prompt(2))


def test_lives_go_on_where_checkpoints_are_loaded_and_brought_back(tmp_path: Path) -> None:
    now, memory = 0.0, HybridMemory(TOY.memory_spec, "8MiB", rollback_window=4)
    cache = PrefixCache(memory, max_bytes="8MiB")
    for i in range(2):
        sequence = memory.open()
        memory.run(TOY, {sequence: prompt(i)})
        cache.insert(sequence)
    assert cache.save(tmp_path) > 0
    other = HybridMemory(TOY.memory_spec, "8MiB", rollback_window=4)
    loaded = PrefixCache(other, seconds_to_live=10, max_bytes="8MiB", now=lambda: now)
    assert (loaded.load(tmp_path), loaded.load(tmp_path), loaded.stats().n_outside) == (2, 0, 2)
    now = 9.0
    sequence, lookup = loaded.open([*prompt(0), 5])
    assert (lookup.reused, lookup.tier, loaded.stats().n_returned) == (20, "disk", 1)
    now = 10.0
    assert cached(loaded, 2) == [0]
    now = 19.0
    assert cached(loaded, 2) == [] and loaded.stats().n_expired == 2
    other.check()


def test_a_full_budget_passes_over_what_it_cannot_bring_back() -> None:
    """Instead, the nearest checkpoint in the budget serves.

    If there is none, the prompt is computed from its beginning.
    """
    memory = make("128KiB")
    cache = PrefixCache(memory, grid_tokens=0, max_bytes="8MiB")
    insert(cache, [1] * 200)
    insert(cache, [2] * 9)
    cache.reclaim(1 << 30)
    insert(cache, [1] * 20)
    cache.pin([1] * 20)
    held = memory.open()
    with pytest.raises(CapacityError):
        while True:
            memory.run(None, {held: [3] * 16})
    assert [cache.open(tokens)[1].reused for tokens in ([1] * 201, [2] * 10)] == [20, 0]
    stats = cache.stats()
    assert (stats.n_lookups, stats.n_hits, stats.n_returned, stats.n_lost) == (5, 1, 0, 0)
    memory.close(held)
    assert [cache.open(tokens)[1].reused for tokens in ([1] * 201, [2] * 10)] == [200, 9]
    assert (cache.stats().n_returned, cache.stats().n_tokens, cache.stats().n_reused) == (2, 229 + 2 * 211, 229)
    memory.check()


def test_what_is_computed_again_is_inside_again_with_its_priority() -> None:
    memory = make("128KiB")  # The budget is so small that no more checkpoints give way than needed.
    cache = PrefixCache(memory, grid_tokens=0, max_bytes="8MiB")
    insert(cache, prompt(0), priority=1000.0)
    insert(cache, prompt(1))
    cache.reclaim(1 << 30)
    assert cache.stats().n_outside == 2
    for i in (0, 1):
        sequence = memory.open()
        memory.run(None, {sequence: prompt(i)})
        cache.insert(sequence)
        cache.insert(sequence)
        memory.close(sequence)
    assert (cache.stats().n_outside, cache.stats().n_checkpoints) == (0, 2)
    for tiers in (["budget", "host"], ["host", "host"]):
        assert cache.reclaim(1)
        assert [cache.find([*prompt(i), 5]).tier for i in (0, 1)] == tiers
    assert not cache.reclaim(1)


@pytest.mark.parametrize("comes_back, order", [(False, (0, 1, 2)), (False, (1, 0, 2)), (True, (0, 1, 2))])
def test_a_checkpoint_is_worth_the_tokens_behind_the_one_above_it(
    comes_back: bool, order: tuple[int, int, int]
) -> None:
    """All states have one size.

    A checkpoint of 24 tokens after one of 20 saves 4, which is less than 6. It saves 24 once those above it are gone.
    """
    clock, spec = [0.0], Toy(attention=False).memory_spec
    prompts = [[1] * 20, [1] * 20 + [2] * 4, [3] * 6]
    for is_gone in (False, True):
        memory = HybridMemory(spec, "16KiB", rollback_window=4, device="meta")
        cache = PrefixCache(memory, grid_tokens=0, max_bytes="8MiB", now=lambda: clock[0])
        for tokens in map(prompts.__getitem__, order):
            insert(cache, tokens, seconds_to_live=10.0 if len(tokens) == 20 else 1e9)
        if comes_back:
            cache.reclaim(1 << 20)
            for tokens in prompts:
                memory.close(cache.open([*tokens, 9])[0])
        clock[0] += 20.0 if is_gone else 0.0
        cache.find([5])
        assert cache.stats().n_expired == is_gone
        assert cache.reclaim(1)
        assert [cache.find([*tokens, 9]).tier for tokens in prompts[1:]] == (
            ["budget", "host"] if is_gone else ["host", "budget"]
        )


def test_what_frees_nothing_gives_way_only_for_what_is_missing() -> None:
    """A sequence still holds all blocks of this checkpoint, so closing it frees nothing.

    Other evictions do not close it.
    """
    cache = PrefixCache(make())
    insert(cache, prompt(0))
    live, _ = cache.open(prompt(1))
    cache.memory.run(None, {live: prompt(1)})
    cache.insert(live)
    assert cache.reclaim(1) and cached(cache, 2) == [1]
    assert cache.reclaim(1) and cached(cache, 2) == []


def test_of_those_that_share_with_each_other_alone_no_more_go_than_are_needed() -> None:
    """Closing one of the two frees nothing, and closing the other then frees all that they share.

    Then there is room, and the next two stay.
    """
    cache = PrefixCache(make("32KiB"))
    for i in range(2):
        sequence = cache.memory.open()
        cache.memory.run(None, {sequence: prompt(i)})
        cache.insert(sequence, "alice")
        cache.insert(sequence, "bob")
        cache.memory.close(sequence)
    assert cache.stats().private_bytes == 0 and cache.reclaim(1)
    found = [[cache.find([*prompt(i), 5], owner).reused for owner in ("alice", "bob")] for i in range(2)]
    assert found == [[0, 0], [20, 20]] and cache.stats().n_evicted == 2


def test_without_room_outside_checkpoints_are_closed_and_calls_are_refused() -> None:
    """Host memory has no room, or other swapped-out sequences take all that checkpoints may have."""
    memory = make(host_budget=64)
    cache = PrefixCache(memory, max_bytes="8MiB")
    insert(cache, prompt(0))
    sequence, _ = cache.open(prompt(1))
    memory.run(None, {sequence: prompt(1)})
    with pytest.raises(CapacityError):
        memory.swap_out(sequence)
    assert cache.reclaim(1 << 20) and not cache.reclaim(1)
    with pytest.raises(CapacityError):
        memory.swap_out(sequence)
    assert (cache.stats().n_moved, cache.stats().n_evicted, cache.stats().n_checkpoints) == (0, 1, 0)
    roomy = make()
    other = PrefixCache(roomy, max_bytes=roomy.needed_bytes(40))
    guest = roomy.open()
    roomy.run(None, {guest: [1] * 40})
    roomy.swap_out(guest)
    insert(other, prompt(0))
    assert other.reclaim(1) and (other.stats().n_moved, other.stats().n_evicted) == (0, 1)
    assert guest.is_swapped


def test_checkpoints_of_a_way_and_behind_it_belong_to_their_owner() -> None:
    cache = PrefixCache(make(), grid_tokens=8)
    for owner in (None, "bob"):
        for n_tokens in (8, 16, 20):
            insert(cache, [1] * n_tokens, owner=owner)
    for owner, other in ((None, "bob"), ("bob", None)):
        own = cache.checkpoints_of([1] * 18, owner)
        assert [mark.length for mark in own] == [8, 16]
        assert [mark.length for mark in cache.checkpoints_behind([1] * 8, owner)] == [16, 20]
        assert not {*own} & {*cache.checkpoints_of([1] * 18, other)}
    assert cache.fetch([1] * 20) == [] and cache.has_arrived(own[0])
    assert (cache.seconds_a_token, cache.note_speed(0.5), cache.seconds_a_token) == (None, None, 0.5)


def test_options_are_read_to_the_letter() -> None:
    memory = make()
    assert PrefixCache(memory, grid_tokens=0, max_bytes="0", seconds_to_live=0.5).grid_tokens == 0
    assert PrefixCache(memory).cuts([1] * 1030, 0) == [512, 1024]
    for options in ({"grid_tokens": 1.5}, {"max_bytes": -1}, {"seconds_to_live": "long"}):
        with pytest.raises(SpecError):
            PrefixCache(memory, **cast(Any, options))
    cache = PrefixCache(memory, grid_tokens=1)
    assert cache.cuts([1] * 5, 2) == [3, 4] and cache.cuts([1, 2], 0, marks=(0, 2)) == [1]
    with pytest.raises(BatchError, match="give a list of positions"):
        cache.cuts([1, 2], 0, marks=cast(Any, 5))
    sequence = memory.open()
    memory.run(None, {sequence: [1, 2]})
    for priority in (0, -1, "2"):
        with pytest.raises(SpecError, match="priority="):
            cache.insert(sequence, priority=cast(Any, priority))
    cache.insert(sequence, priority=0.5)
    with pytest.raises(SpecError, match="PrefixCache"):
        PrefixCache(cast(Any, None))


def test_a_closed_cache_holds_nothing_and_says_so() -> None:
    memory = make(host_budget="1MiB")
    with PrefixCache(memory, max_bytes="1MiB") as cache:
        assert cache.memory is memory
        insert(cache, prompt(0))
        cache.reclaim(1 << 30)
        insert(cache, prompt(1))
        assert "2 checkpoints" in repr(cache)
    assert memory.usage().used_bytes == 0 == sum(memory.counters.swapped_bytes) and "closed" in repr(cache)
    cache.close()
    for use in (lambda: cache.find([1]), lambda: cache.memory, cache.__enter__, cache.stats):
        with pytest.raises(SequenceError, match="prefix cache is closed"):
            use()
    assert not memory.counters.swaps.reclaimers
    with PrefixCache(memory) as fresh:
        insert(fresh, prompt(0))
        memory.close_all()
    fresh.close()


def test_a_cache_that_nobody_has_gives_its_bytes_to_whoever_needs_them() -> None:
    memory = make(3 * make().needed_bytes(40))
    cache = PrefixCache(memory)
    insert(cache, [1] * 40)
    insert(cache, [2] * 40)
    del cache
    assert len(memory.sequences) == 2
    while memory.sequences[0].is_checkpoint:
        memory.run(None, {memory.open(): [3] * 40})
        memory.check()
    assert not any(sequence.is_checkpoint for sequence in memory.sequences)
    with pytest.raises(CapacityError):
        while True:
            memory.run(None, {memory.open(): [3] * 40})
