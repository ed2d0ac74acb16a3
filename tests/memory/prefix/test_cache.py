"""The prefix cache is compared with a plain list of prompts. A reused prefix gives what a fresh run gives."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridmem.memory import (
    AttentionSpec,
    BatchError,
    CapacityError,
    CrossAttentionSpec,
    HybridMemory,
    MemorySpec,
    Sequence,
    SequenceError,
    SpecError,
)
from hybridmem.memory.prefix.cache import PrefixCache
from tests.extent import few_cases, only_in_long, pick
from tests.subjects import Subject, make_subject
from tests.toy import VOCAB, Toy

WINDOW = 6


@pytest.fixture(scope="module", params=["toy", "toy-attention", "toy-recurrent", "toy-sparse", "jamba", "mamba"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp("model"))


def prefill(
    subject: Subject, cache: PrefixCache, tokens: list[int], marks: tuple[int, ...] = ()
) -> tuple[Sequence, torch.Tensor]:
    """Prefill as an engine does. Return the sequence after the prompt, and the logits of its last token."""
    sequence, lookup = cache.open(tokens)
    assert sequence.tokens.tolist() == tokens[: lookup.reused] and lookup.reused < len(tokens)
    at, logits = lookup.reused, torch.empty(0)
    for end in [*cache.cuts(tokens, at, marks), len(tokens)]:
        logits = subject.feed(cache.memory, sequence, [tokens[at:end]])[-1:]
        cache.insert(sequence)
        at = end
    return sequence, logits


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@few_cases
@pytest.mark.parametrize("seed", range(pick(1, 3)))
def test_random_prompts_are_continued_as_fresh_ones(subject: Subject, seed: int) -> None:
    """Prompts part from earlier ones anywhere.

    Outputs are those of a memory of their own, and lookups are those of a list of prompts.
    """
    rng, memory = random.Random(seed), subject.memory(WINDOW)
    cache, seen = PrefixCache(memory, grid_tokens=16), list[list[int]]()
    for _ in range(25):
        base = rng.choice(seen) if seen and rng.random() < 0.8 else []
        tokens = base[: rng.randint(0, len(base))] + [rng.randrange(10) for _ in range(rng.randint(1, 25))]
        expected = max((common(tokens, other) for other in seen), default=0)
        lookup = cache.find(tokens)
        assert (lookup.n_tokens, lookup.by_attention) == (len(tokens), expected)
        assert lookup.reused <= min(expected, len(tokens) - 1) and lookup.recomputed == len(tokens) - lookup.reused
        if subject.reaches_everything:
            assert lookup.reused == min(expected, len(tokens) - 1)
        sequence, logits = prefill(subject, cache, tokens)
        subject.assert_same(logits, subject.fresh([tokens], WINDOW)[-1:])
        subject.feed(memory, sequence, [[1], [2]])
        memory.check()
        memory.close(sequence)
        seen.append(tokens)
    stats = cache.stats()
    assert (
        stats.n_lookups == 25
        and 0 < stats.n_reused < stats.n_tokens
        and stats.hit_rate == stats.n_reused / stats.n_tokens
    )
    cache.clear()
    assert memory.usage().used_bytes == 0 and cache.stats().n_checkpoints == 0


def test_where_prompts_part_twice_states_are_kept(subject: Subject) -> None:
    """Nobody marks the shared part. The second prompt finds where it ends, and the third reuses all of it."""
    shared, cache = subject.tokens(50), PrefixCache(subject.memory(WINDOW), grid_tokens=0)
    reused = []
    for seed in range(1, 5):
        tokens = [*shared, seed, *subject.tokens(20, seed=seed)]
        reused.append(cache.find(tokens).reused)
        cache.memory.close(prefill(subject, cache, tokens)[0])
    assert reused == ([0, 50, 50, 50] if subject.reaches_everything else [0, 0, 50, 50])


def test_a_mark_makes_the_second_prompt_hit(subject: Subject) -> None:
    shared, cache = subject.tokens(50), PrefixCache(subject.memory(WINDOW), grid_tokens=0)
    cache.memory.close(prefill(subject, cache, [*shared, 1, *subject.tokens(20, seed=1)], marks=(50,))[0])
    lookup = cache.find([*shared, 2, 3])
    assert (lookup.by_attention, lookup.by_recurrent, lookup.reused) == (50, 50, 50)
    assert lookup.why == "all 50 tokens that were seen before"


def test_the_same_prompt_again_costs_one_token(subject: Subject) -> None:
    cache, tokens = PrefixCache(subject.memory(WINDOW)), subject.tokens(40)
    first, logits = prefill(subject, cache, tokens)
    lookup = cache.find(tokens)
    assert (lookup.reused, lookup.recomputed) == (39, 1) and "last token" in lookup.why
    _, again = prefill(subject, cache, tokens)
    subject.assert_same(again, logits)
    assert cache.stats().n_checkpoints == 1
    lookup = cache.find(tokens[:37])  # The position is within the window behind the checkpoint.
    assert lookup.reused == 36
    assert first.tokens.tolist() == tokens


@few_cases
@pytest.mark.parametrize("kind", ["toy-h2o", "toy-4-bit", "toy-attention-recent-2-bit"])
def test_a_hit_sees_the_rows_of_its_own_length(kind: str, tmp_path: Path) -> None:
    """A prompt parts from a longer one within the window.

    The longer one had folded rows that the prompt still sees.
    """
    subject = make_subject(kind, tmp_path)
    for n_tokens in range(40, 48):
        cache, tokens = PrefixCache(subject.memory(WINDOW), grid_tokens=0), subject.tokens(n_tokens)
        prefill(subject, cache, tokens)
        for n_shared in range(n_tokens - WINDOW, n_tokens):
            other = [(tokens[n_shared] + 1) % VOCAB, *subject.tokens(5, seed=n_shared)]
            assert cache.find(tokens[:n_shared] + other).reused == n_shared
            sequence, logits = prefill(subject, cache, tokens[:n_shared] + other)
            more = subject.feed(cache.memory, sequence, [[1], [2], [3]])
            expected = subject.fresh([tokens[:n_shared], other, [1], [2], [3]], WINDOW)[-4:]
            subject.assert_same(torch.cat([logits, more]), expected)


def test_a_prompt_that_parts_before_the_window_says_why_it_computes_again(tmp_path: Path) -> None:
    subject = make_subject("toy", tmp_path)
    cache, tokens = PrefixCache(subject.memory(WINDOW), grid_tokens=16), subject.tokens(60)
    prefill(subject, cache, tokens)
    lookup = cache.find([*tokens[:30], (tokens[30] + 1) % VOCAB, 5])
    assert lookup.reused == 30  # The checkpoint at 32 is rolled back by two tokens.
    lookup = cache.find([*tokens[:22], (tokens[22] + 1) % VOCAB, 5])
    assert (lookup.by_attention, lookup.by_recurrent, lookup.reused) == (22, 16, 16)
    assert lookup.why.endswith("recurrent states were kept at 16, and tokens 16 ... 21 are computed again")
    lookup = cache.find([*tokens[:4], (tokens[4] + 1) % VOCAB, 5])
    assert lookup.reused == 0 and lookup.why.endswith("there is no checkpoint on that path")
    assert cache.find([(tokens[0] + 1) % VOCAB]).why == "nothing like it was seen before"


def test_cuts_are_where_prompts_part_where_marks_are_and_on_the_grid(tmp_path: Path) -> None:
    subject = make_subject("toy", tmp_path)
    cache, tokens = PrefixCache(subject.memory(WINDOW), grid_tokens=16), subject.tokens(40)
    prefill(subject, cache, tokens)
    other = [*tokens[:21], (tokens[21] + 1) % VOCAB, *tokens[:20]]
    assert cache.cuts(other, 16, marks=(5, 30, 42)) == [21, 30, 32]
    assert PrefixCache(subject.memory(WINDOW), grid_tokens=0).cuts(other, 0) == []
    for mark in (-1, 43, 1.5, True):
        with pytest.raises(BatchError, match=r"mark .* is no position of a prompt of 42 tokens"):
            cache.cuts(other, 0, marks=(mark,))  # type: ignore[arg-type]


@few_cases
def test_checkpoints_make_room_and_never_cause_a_refusal(subject: Subject) -> None:
    """A memory full of cached prefixes takes all that an empty one takes. What is worth least is closed first."""
    need = subject.memory(WINDOW)
    subject.feed(need, need.open(), [subject.tokens(60)])
    budget = 3 * need.usage().used_bytes
    memory = subject.memory(WINDOW, budget=budget)
    cache = PrefixCache(memory, grid_tokens=16)
    for seed in range(12):
        memory.close(prefill(subject, cache, [seed, *subject.tokens(59, seed=seed)])[0])
        memory.check()
    assert cache.stats().n_evicted
    alone = subject.memory(WINDOW, budget=budget)
    for seed in range(40):
        tokens = subject.tokens(60, seed=100 + seed)
        try:
            subject.feed(alone, alone.open(), [tokens])
        except CapacityError:
            with pytest.raises(CapacityError):
                subject.feed(memory, memory.open(), [tokens])
            break
        subject.feed(memory, memory.open(), [tokens])
    else:
        raise AssertionError("the budget was never full")
    assert cache.stats().n_checkpoints == 0
    memory.check()


def test_of_equal_checkpoints_the_one_not_used_goes_first(tmp_path: Path) -> None:
    subject = make_subject("toy", tmp_path)
    need = subject.memory(WINDOW)
    subject.feed(need, need.open(), [subject.tokens(41)])
    # Checkpoints are not freed in lots here, because one is larger than a lot.
    cache = PrefixCache(subject.memory(WINDOW, budget=20 * need.usage().used_bytes), grid_tokens=0)
    prompts = [[seed, *subject.tokens(40, seed=seed)] for seed in range(4)]
    for tokens in prompts:
        cache.memory.close(prefill(subject, cache, tokens)[0])
    cache.memory.close(cache.open(prompts[0])[0])
    assert cache.reclaim(1) and cache.reclaim(1)
    assert [cache.find(tokens).reused for tokens in prompts] == [40, 0, 0, 40]
    assert cache.reclaim(10**9) and not cache.reclaim(1)


def test_checkpoints_go_in_lots_of_one_part_in_64_of_the_budget(tmp_path: Path) -> None:
    subject = make_subject("toy", tmp_path)
    need = subject.memory(WINDOW)
    subject.feed(need, need.open(), [subject.tokens(41)])
    one_bytes = need.usage().used_bytes
    cache = PrefixCache(subject.memory(WINDOW, budget=64 * 3 * one_bytes), grid_tokens=0)
    for seed in range(8):
        cache.memory.close(prefill(subject, cache, [seed, *subject.tokens(40, seed=seed)])[0])
    free_bytes = cache.memory.free_bytes
    assert cache.reclaim(1)
    assert 3 * one_bytes <= cache.memory.free_bytes - free_bytes < 6 * one_bytes
    assert 0 < cache.stats().n_checkpoints < 8


def test_owners_find_what_is_theirs_as_if_each_had_a_cache_alone(tmp_path: Path) -> None:
    subject, rng = make_subject("toy", tmp_path), random.Random(0)
    shared, alone = PrefixCache(subject.memory(WINDOW), grid_tokens=16), {}
    for _ in range(40):
        owner = rng.choice(["alice", "bob", None])
        cache = alone.setdefault(owner, PrefixCache(subject.memory(WINDOW), grid_tokens=16))
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
        assert shared.find(tokens, owner) == cache.find(tokens)
        found = []
        for one, as_owner in ((shared, owner), (cache, None)):
            sequence, lookup = one.open(tokens, as_owner)
            found.append((lookup, cuts := one.cuts(tokens, lookup.reused, (1,), as_owner)))
            for end in [*cuts, len(tokens)]:
                subject.feed(one.memory, sequence, [tokens[sequence.length : end]])
                one.insert(sequence, as_owner)
            one.memory.close(sequence)
        assert found[0] == found[1]
    shared.memory.check()
    assert shared.stats().n_checkpoints == sum(cache.stats().n_checkpoints for cache in alone.values())
    assert shared.reclaim(10**9) and shared.memory.usage().used_bytes == 0


class Owner:
    """Is the owner of prompts. Unlike a name, it shows when nothing refers to it any more."""


@only_in_long
@pytest.mark.parametrize("way", ["reclaim", "clear", "close"])
def test_owners_of_nothing_are_forgotten(way: str, tmp_path: Path) -> None:
    subject = make_subject("toy", tmp_path)
    cache, owner = PrefixCache(subject.memory(WINDOW)), Owner()
    sequence = cache.memory.open()
    subject.feed(cache.memory, sequence, [subject.tokens(20)])
    cache.insert(sequence, owner)
    assert cache.find(subject.tokens(30), owner).reused == 20
    gone = weakref.ref(owner)
    del owner
    assert gone() is not None
    if way == "close":
        cache.memory.close_all()  # The memory is closed before the cache, which then has nothing to give back.
    (cache.reclaim(10**9) if way == "reclaim" else getattr(cache, way)())
    gc.collect()
    assert gone() is None


def test_a_sequence_whose_middle_was_dropped_is_not_remembered(tmp_path: Path) -> None:
    subject = make_subject("toy-recurrent", tmp_path)
    memory = subject.memory(WINDOW)
    cache, sequence = PrefixCache(memory), memory.open()
    cache.insert(sequence)
    subject.feed(memory, sequence, [subject.tokens(20)])
    memory.drop(sequence, 4, 5, approximate=True)
    cache.insert(sequence)
    assert cache.stats().n_checkpoints == 0


def test_a_sequence_that_is_swapped_out_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    toy = make_subject("toy", tmp_path)
    with toy.memory(WINDOW) as memory:
        cache, sequence = PrefixCache(memory), memory.open()
        toy.feed(memory, sequence, [[1, 2, 3]])
        memory.swap_out(sequence)
        with pytest.raises(SequenceError, match="swapped out"):
            cache.insert(sequence, "me")
        assert not cache.stats().book_bytes and not cache.find([1, 2, 3, 4], "me").by_attention
        memory.swap_in(sequence)
        cache.insert(sequence, "me")
        assert cache.find([1, 2, 3, 4], "me").reused == 3


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    subject = make_subject("toy", tmp_path)
    memory = subject.memory(WINDOW)
    cache = PrefixCache(memory)
    with pytest.raises(BatchError, match="empty"):
        cache.open([])
    for bad in ([1.5], [[1], [2]], ["a"], 3, np.zeros((2, 2), np.int64)):
        with pytest.raises(BatchError, match=r"give a list or array of integer token ids|give one axis"):
            cache.find(bad)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="grid_tokens=-1"):
        PrefixCache(memory, grid_tokens=-1)
    encoder_decoder = MemorySpec(((AttentionSpec(1, 1, 4), CrossAttentionSpec(1, 1, 4)),), 9)
    with pytest.raises(SpecError, match="encoder"):
        PrefixCache(HybridMemory(encoder_decoder, "1MiB"))
    assert not memory.usage().by_sequence


def test_what_is_forgotten_leaves_what_other_prompts_begin_with() -> None:
    model = Toy()
    memory = HybridMemory(model.memory_spec, "4MiB", rollback_window=4, page_tokens=4)
    cache = PrefixCache(memory, grid_tokens=8)
    common = list(range(8))
    one, other = [*common, *[9] * 20], [*common, *[10] * 10]
    for prompt in (one, other):
        sequence, found = cache.open(prompt)
        for end in [*cache.cuts(prompt, found.reused), len(prompt)]:
            memory.run(model, {sequence: prompt[sequence.length : end]})
            cache.insert(sequence)
        memory.close(sequence)
    assert cache.forget(one, behind=16) == 2  # The checkpoints are at 28 and at 24.
    assert cache.forget(one) == 1 and cache.find(one).reused == 8
    assert cache.forget(other, owner="another") == 0
    assert cache.forget(other) == 3 and memory.usage().used_bytes == 0
