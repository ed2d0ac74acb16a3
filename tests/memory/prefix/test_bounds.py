"""What a cache keeps outside of the budget is bounded, and what is worth least makes room.

What is there is found.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridmem.memory import HybridMemory, Sequence
from hybridmem.memory.prefix import PrefixCache
from tests.inside import outside_ascending
from tests.memory.prefix.test_outside import WINDOW, run
from tests.subjects import Subject, make_subject

PROMPTS = [[first, *range(10), *range(10)] for first in range(6)]  # These prompts share nothing.


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject("toy", tmp_path_factory.mktemp("toy"))


def push_out(cache: PrefixCache) -> None:
    while cache.reclaim(cache.memory.budget):
        cache.memory.check()


def bytes_of_one(toy: Subject) -> int:
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=0, max_bytes="1GiB")
        run(toy, cache, PROMPTS[:1])
        push_out(cache)
        return sum(memory.counters.swapped_bytes)


def kept_of(cache: PrefixCache) -> list[int]:
    return [i for i, tokens in enumerate(PROMPTS) if cache.find(tokens).reused]


def test_what_is_outside_takes_no_more_than_it_may_and_the_oldest_goes_first(toy: Subject) -> None:
    n_bytes = bytes_of_one(toy)
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=0, max_bytes=3 * n_bytes)
        for tokens in PROMPTS:
            run(toy, cache, [tokens])
            push_out(cache)
            assert sum(memory.counters.swapped_bytes) <= 3 * n_bytes
        assert kept_of(cache) == [3, 4, 5]
        stats = cache.stats()
        assert (stats.n_moved, stats.n_evicted, stats.n_outside) == (6, 3, 3)
        run(toy, cache, [PROMPTS[3]])
        push_out(cache)
        run(toy, cache, [PROMPTS[0]])
        push_out(cache)
        assert kept_of(cache) == [0, 3, 5]  # Prompt 3 was used again, so it is worth more than 4.


def test_what_is_larger_than_all_room_outside_is_closed(toy: Subject) -> None:
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=0, max_bytes=bytes_of_one(toy) - 1)
        run(toy, cache, PROMPTS[:2])
        push_out(cache)
        assert (cache.stats().n_moved, cache.stats().n_evicted, cache.stats().n_checkpoints) == (0, 2, 0)
        exact = PrefixCache(memory, grid_tokens=0, max_bytes=bytes_of_one(toy))
        run(toy, exact, PROMPTS[:1])
        push_out(exact)
        assert (exact.stats().n_moved, exact.stats().n_evicted) == (1, 0)


def test_a_full_host_takes_room_from_what_is_cached(toy: Subject) -> None:
    """A sequence that is swapped out needs host memory that checkpoints hold.

    No more of them are closed than needed.
    """
    n_bytes = bytes_of_one(toy)
    with toy.memory(WINDOW, host_budget=3 * n_bytes) as memory:
        cache = PrefixCache(memory, grid_tokens=0, max_bytes=4 * n_bytes)
        run(toy, cache, PROMPTS[:3])
        push_out(cache)
        assert kept_of(cache) == [0, 1, 2]
        guest = memory.open()
        memory.run(toy.model, {guest: PROMPTS[5]})
        memory.swap_out(guest)
        memory.check()
        assert kept_of(cache) == [1, 2] and cache.stats().n_evicted == 1
        del cache  # A cache that is gone is asked for no room.
        memory.swap_in(guest)
        memory.check()


def test_what_takes_longer_to_read_than_to_compute_is_not_kept_outside(toy: Subject, tmp_path: Path) -> None:
    """The cache knows how fast reading is once something was read back.

    Until then it keeps everything.
    """
    with toy.memory(WINDOW, host_budget=1, swap_dir=tmp_path) as memory:
        cache = PrefixCache(memory, grid_tokens=0, max_bytes="1GiB")
        cache.note_speed(1e-12)
        run(toy, cache, PROMPTS[:2])
        push_out(cache)
        assert kept_of(cache) == [0, 1]
        run(toy, cache, PROMPTS[:1])  # The checkpoint is read back.
        push_out(cache)
        assert kept_of(cache) == [1] and cache.stats().n_evicted == 1
        cache.note_speed(1e6)
        run(toy, cache, PROMPTS[2:3])
        push_out(cache)
        assert kept_of(cache) == [1, 2]


def test_a_folder_that_is_loaded_twice_adds_nothing(toy: Subject, tmp_path: Path) -> None:
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=8)
        run(toy, cache, PROMPTS[:2])
        cache.save(tmp_path)
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=8)
        n_loaded = cache.load(tmp_path)
        assert n_loaded == 6 and cache.load(tmp_path) == 0
        assert len(memory.sequences) == cache.stats().n_checkpoints == 6
        run(toy, cache, PROMPTS[:2])
        assert cache.stats().n_returned == 2 and not cache.stats().n_lost


def test_what_is_loaded_gives_way_in_the_order_of_its_worth(
    toy: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more token may take one more block.

    Then a checkpoint saves more tokens, but is worth less for each byte.
    """
    monkeypatch.setattr("hybridmem.memory.prefix.eviction_rank._COMPUTED_AT_ONCE", 1)
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=0)
        run(toy, cache, [[first, *[1] * (4 + first)] for first in range(19)])
        cache.save(tmp_path)
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=0, max_bytes="1GiB")
        assert cache.load(tmp_path) == 19
        given = [(one.length, n_bytes) for one, n_bytes in outside_ascending(cache)]
        assert given == sorted(given, key=lambda one: one[0] / one[1]) != sorted(given)


def test_checkpoints_behind_a_prefix(toy: Subject) -> None:
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=8)
        run(toy, cache, [[1] * 20, [1] * 12 + [2] * 8])

        def lengths(tokens: list[int]) -> list[int]:
            return [checkpoint.length for checkpoint in cache.checkpoints_behind(tokens)]

        assert sorted(lengths([1] * 5)) == [8, 16, 16, 20, 20]
        assert lengths([1] * 12) == [16, 20, 16, 20]  # The checkpoints of the second prompt were made last.
        assert lengths([1] * 12 + [2]) == [16, 20]
        assert lengths([1] * 20) == lengths([1] * 13 + [2]) == lengths([3]) == []


def test_a_checkpoint_that_is_there_already_gets_a_new_time_to_live(toy: Subject) -> None:
    clock = [0.0]
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=0, now=lambda: clock[0])
        sequence = fed(toy, memory, PROMPTS[0])
        cache.insert(sequence, seconds_to_live=5)
        cache.insert(sequence)
        clock[0] = 4.0
        cache.insert(sequence, seconds_to_live=10)
        clock[0] = 13.0
        assert cache.find(PROMPTS[0]).reused
        clock[0] = 14.5
        assert not cache.find(PROMPTS[0]).reused and cache.stats().n_expired == 1


def fed(toy: Subject, memory: HybridMemory, tokens: list[int]) -> Sequence:
    sequence = memory.open()
    memory.run(toy.model, {sequence: tokens})
    return sequence
