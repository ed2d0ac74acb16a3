"""Some checkpoints stay: pinned ones, those of higher priority, and those whose time to live has not ended."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hybridmem.memory import BatchError, HybridMemory, SpecError
from hybridmem.memory.prefix import PrefixCache
from tests.toy import Toy

TOY = Toy()


def memory(budget: int | str = "8MiB", **options: object) -> HybridMemory:
    return HybridMemory(TOY.memory_spec, budget, rollback_window=4, device="meta", **options)  # type: ignore[arg-type]


def insert(cache: PrefixCache, tokens: list[int], **options: float) -> None:
    sequence, lookup = cache.open(tokens)
    cache.memory.run(None, {sequence: tokens[lookup.reused :]})
    cache.insert(sequence, **options)
    cache.memory.close(sequence)


def prompt(i: int) -> list[int]:
    return [i // 10, i % 10] * 10


def small() -> HybridMemory:
    """Return a memory with room for about six prompts."""
    with memory() as roomy:
        cache = PrefixCache(roomy)
        for i in range(6):
            insert(cache, prompt(i))
        return memory(roomy.usage().used_bytes)


def is_cached(cache: PrefixCache, i: int) -> bool:
    return cache.find([*prompt(i), 5]).reused == 20


def test_a_pinned_checkpoint_gives_way_to_nothing_until_it_is_unpinned() -> None:
    cache = PrefixCache(small())
    insert(cache, prompt(0))
    assert cache.pin(prompt(0)) == 20
    for i in range(1, 60):
        insert(cache, prompt(i))
    assert is_cached(cache, 0) and not is_cached(cache, 1)
    assert cache.unpin(prompt(0)) == 20
    for i in range(60, 90):
        insert(cache, prompt(i))
    assert not is_cached(cache, 0)
    with pytest.raises(BatchError, match="no checkpoint of these 20 tokens"):
        cache.pin(prompt(0))
    cache.memory.check()


def test_a_pinned_checkpoint_stays_pinned_when_it_comes_back(tmp_path: Path) -> None:
    cache = PrefixCache(memory(), max_bytes="64MiB")
    for i in range(4):
        insert(cache, prompt(i))
    cache.reclaim(1 << 30)
    assert cache.stats().n_outside == 4
    cache.pin(prompt(0))
    sequence, lookup = cache.open([*prompt(0), 5])
    assert (lookup.reused, lookup.tier) == (20, "host")
    cache.memory.close(sequence)
    cache.reclaim(1 << 30)
    assert cache.stats().n_outside == 3 and cache.find([*prompt(0), 5]).tier == "budget"


def test_the_tree_says_where_each_checkpoint_is(tmp_path: Path) -> None:
    cache = PrefixCache(memory(), max_bytes="64MiB")
    insert(cache, prompt(0))
    cache.reclaim(1 << 30)
    insert(cache, [*prompt(0), *prompt(1)])
    insert(cache, prompt(2))
    first, second, third = cache.tree().splitlines()
    assert first == "20 tokens, in the budget" or first.startswith("20 tokens, ")
    assert second.startswith("  40 tokens, ") and second.endswith(", in the budget") and third.startswith("20 tokens, ")
    cache.reclaim(1 << 30)
    assert cache.tree().splitlines() == [
        "20 tokens, in host memory", "  40 tokens, in host memory", "20 tokens, in host memory",
    ]  # fmt: skip


def test_priority_decides_between_checkpoints_of_equal_use() -> None:
    cache = PrefixCache(small())
    for i in range(5):
        insert(cache, prompt(i), **({"priority": 1000.0} if i == 1 else {}))
    for i in range(20, 28):
        insert(cache, prompt(i))
    assert is_cached(cache, 1) and not is_cached(cache, 0) and not is_cached(cache, 2)


def test_checkpoints_are_closed_at_the_end_of_their_time_to_live() -> None:
    now = 100.0
    cache = PrefixCache(memory(), seconds_to_live=10, now=lambda: now)
    insert(cache, prompt(0))
    insert(cache, prompt(1), seconds_to_live=100)
    insert(cache, prompt(2), seconds_to_live=math.inf)
    insert(cache, prompt(3))
    now = 108.0
    cache.memory.close(cache.open([*prompt(3), 5])[0])  # The checkpoint is used, so it lives on.
    now = 111.0
    assert [is_cached(cache, i) for i in range(4)] == [False, True, True, True]
    now = 119.0
    assert [is_cached(cache, i) for i in range(4)] == [False, True, True, False]
    now = 1e9
    assert [is_cached(cache, i) for i in range(4)] == [False, False, True, False]
    assert cache.stats().n_expired == 3 and cache.stats().n_evicted == 0
    cache.clear()
    assert cache.memory.usage().used_bytes == 0


def test_a_pinned_checkpoint_does_not_expire() -> None:
    now = 0.0
    cache = PrefixCache(memory(), seconds_to_live=10, now=lambda: now)
    insert(cache, prompt(0))
    cache.pin(prompt(0))
    now = 1000.0
    assert is_cached(cache, 0)
    cache.unpin(prompt(0))
    now = 1009.0
    assert is_cached(cache, 0)
    now = 1011.0
    assert not is_cached(cache, 0)


def test_tokens_of_cached_prefixes_are_bounded() -> None:
    """In a model that keeps almost nothing for each token, token ids would soon be most of what is kept."""
    recurrent = Toy(attention=False).memory_spec
    own = HybridMemory(recurrent, "64KiB", rollback_window=4, device="meta")
    cache = PrefixCache(own)
    for i in range(30):
        insert(cache, [i % 10, *[i // 10] * 400])
        assert cache.stats().book_bytes <= own.budget_bytes / 4 + 401 * 16
    assert cache.stats().n_evicted > 0 and is_the_last(cache)


def is_the_last(cache: PrefixCache) -> bool:
    return cache.find([9, *[2] * 400, 5]).reused == 401


@pytest.mark.parametrize("options", [{"priority": 0}, {"priority": "high"}, {"seconds_to_live": -1}])
def test_nonsense_is_refused(options: dict[str, object]) -> None:
    cache = PrefixCache(memory())
    sequence = cache.memory.open()
    cache.memory.run(None, {sequence: [1, 2]})
    with pytest.raises(SpecError, match=f"{next(iter(options))}="):
        cache.insert(sequence, **options)  # type: ignore[arg-type]
    assert cache.stats().n_checkpoints == 0
    with pytest.raises(SpecError, match="seconds_to_live=0"):
        PrefixCache(cache.memory, seconds_to_live=0)
