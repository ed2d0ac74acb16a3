"""A memory says to the byte what requests need, before they are fed.

It refuses them only if they cannot fit, and what it names is enough.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hybridmem.memory import CapacityError, HybridMemory, MemorySpec, Sequence
from hybridmem.memory.chunked_prefill import split_requests
from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.memory.sequences.chunks import GRID_TOKENS
from tests.counting import refused_by_number
from tests.extent import few_cases
from tests.memory.test_capacity import HYBRID, ROOM, SPECS, WINDOWS
from tests.toy import Toy

FOLDS = [None, "keep", "replay"]


def make(spec: MemorySpec, budget: int | str = ROOM, **options: object) -> HybridMemory:
    return HybridMemory(spec, budget, device="meta", **options)  # type: ignore[arg-type]


def run(memory: HybridMemory, requests: dict[Sequence, int], max_tokens: int) -> None:
    memory.run(None, {sequence: np.ones(n, np.int64) for sequence, n in requests.items()}, max_tokens=max_tokens)


@pytest.mark.parametrize("name", SPECS)
def test_what_a_prompt_needs_is_what_its_steps_use_at_most(name: str) -> None:
    for window, fold, n_tokens, size in [
        (0, None, 333, 64),
        (1, "keep", 100, 7),
        (40, "replay", 640, 50),
        (64, "keep", 600, 512),
    ]:
        memory = make(SPECS[name], rollback_window=window, fold=fold)
        size = GRID_TOKENS if memory.spec.is_cut_on_grid else size
        sequence, used = memory.open(), 0
        for start in range(0, n_tokens, size):
            with memory.step({sequence: np.ones(min(size, n_tokens - start), np.int64)}):
                used = max(used, ROOM - memory.free_bytes)
            assert ROOM - memory.free_bytes == memory.counters.bytes_at(sequence.length)
            used = max(used, ROOM - memory.free_bytes)
        assert memory.needed_bytes(n_tokens, max_tokens=size) == used


@few_cases
@pytest.mark.parametrize("name", SPECS)
def test_what_is_refused_does_not_fit_and_what_the_refusal_names_does(name: str) -> None:
    """Whatever an empty memory lacks room for is refused before a step.

    One line less than the counted bytes is never enough.
    """
    rng = random.Random(name)
    for _ in range(4):
        options = {"rollback_window": rng.choice(WINDOWS), "fold": rng.choice(FOLDS)}
        counts, size = [rng.randint(1, 400) for _ in range(rng.choice([1, 1, 2, 5]))], rng.choice([32, 50, 128, 512])

        def feed(budget: int) -> HybridMemory:
            memory = make(SPECS[name], budget, **options)  # noqa: B023
            run(memory, {memory.open(): n for n in counts}, size)  # noqa: B023
            return memory

        roomy = make(SPECS[name], **options)
        least = roomy.counters.least_bytes
        try:
            feed(least)
            continue
        except CapacityError as error:
            assert "can never hold" in str(error) and error.needed > least
            named = error.needed
        feed(named).check()
        new = np.full(len(counts), -1)
        counted = roomy.counters.lack_of_room(new, np.array(counts), size).needed
        assert least <= counted == named
        if counted - 64 >= least:
            with pytest.raises(CapacityError, match="can never hold"):
                feed(counted - 64)


def test_a_refused_step_names_all_kinds_and_all_requests() -> None:
    spec = SPECS["mixed"]
    memory = make(spec, make(spec).needed_bytes(200, max_tokens=200))
    requests = {memory.open(): [1] * 150, memory.open(): [1] * 150}
    with (
        pytest.raises(CapacityError, match=r"300 tokens for 2 sequences need .* can never hold") as caught,
        memory.step(requests),
    ):
        pass
    larger = make(spec, caught.value.needed)
    with larger.step({larger.open(): [1] * 150, larger.open(): [1] * 150}):
        pass


def test_what_others_hold_is_not_now_and_not_never() -> None:
    memory = make(SPECS["dense"], 40 * 16 * 1024)
    held = memory.open()
    run(memory, {held: 16 * 30}, 64)
    asked = memory.open()
    for feed in (lambda: run(memory, {asked: 16 * 20}, 64), lambda: memory.step({asked: [1] * (16 * 20)}).__enter__()):
        with pytest.raises(
            CapacityError, match=r"320 tokens for 1 sequence do not fit now: they need .* bytes more"
        ) as caught:
            feed()
        assert caught.value.needed == memory.counters.bytes_at(320) > caught.value.free == memory.free_bytes
    memory.close(held)
    run(memory, {asked: 16 * 20}, 64)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_refused_that_would_have_fitted_whatever_came_before(seed: int) -> None:
    """Before it come forks, rollbacks and drops.

    The steps would have refused whatever is refused in advance.
    """
    rng, names = (
        random.Random(seed),
        ["hybrid", "window", "dense", "8 bits", "both", "mamba on a cpu", "hybrid on a cpu"],
    )
    n_refused = 0
    for _ in range(4):
        name, fold = rng.choice(names), rng.choice(FOLDS)
        roomy = make(SPECS[name], fold=fold)
        memory = make(SPECS[name], roomy.needed_bytes(rng.randint(200, 900)) + roomy.counters.least_bytes, fold=fold)
        sequences = [memory.open()]
        for _ in range(20):
            sequence, move = rng.choice(sequences), rng.random()
            if move < 0.2:
                sequences.append(memory.fork(sequence))
            elif move < 0.4 and sequence.length:
                memory.rollback(sequence, to=memory.resume_point(sequence, rng.randint(0, sequence.length)))
            elif move < 0.5 and len(sequences) > 1:
                memory.close(sequences.pop(sequences.index(sequence)))
            else:
                n_tokens, chosen = rng.randint(1, 300), rng.sample(sequences, rng.randint(1, len(sequences)))
                size = rng.choice([16, 100, 512])
                try:
                    memory.counters.require_room(chosen, np.full(len(chosen), n_tokens), size)
                except CapacityError:
                    n_refused += 1
                    with pytest.raises(CapacityError):
                        step_unasked(memory, chosen, n_tokens, size)
                    continue
                try:
                    run(memory, dict.fromkeys(chosen, n_tokens), size)
                except CapacityError as error:  # Checkpoints, to which a failure returns, hold what the steps replace.
                    assert error.needed > error.free
        memory.check()
    assert n_refused


def step_unasked(memory: HybridMemory, sequences: list[Sequence], n_tokens: int, max_tokens: int) -> None:
    """Take a step as a run does, without a checkpoint and without asking for room first."""
    counts = np.full(len(sequences), n_tokens)
    for chunk in split_requests(sequences, counts, max_tokens, on_grid=memory.spec.is_cut_on_grid):
        with memory.step({sequences[i]: [1] * (end - start) for i, start, end in chunk}):
            pass


# The tests below are about prompts that can never fit.


@pytest.mark.parametrize(("budget", "n_tokens"), [("24MiB", 1_000_000), ("256MiB", 4_000_000)])
def test_impossible_prompts_are_refused_before_anybody_looks_at_them(budget: str, n_tokens: int) -> None:
    """Prompts are a list, an array or a tensor, even of what are no tokens.

    The memory looks only at their number, and copies none.
    """
    memory = make(HYBRID, budget)
    sequence = memory.open()
    memory.needed_bytes(1)
    for tokens in ([object()] * n_tokens, np.full(n_tokens, -1.5), torch.empty(n_tokens, device="meta")):
        for feed in (memory.step, lambda requests: memory.run(None, requests)):
            with refused_by_number(n_tokens, n_tokens) as caught:
                feed({sequence: tokens})  # type: ignore[operator]
            assert caught.value.needed > n_tokens * 1000 > memory.budget_bytes
    assert sequence.length == 0 and memory.free_bytes == memory.budget_bytes


def test_optional_bytes_stay_where_the_whole_budget_is_too_small() -> None:
    model = Toy()
    memory = HybridMemory(model.memory_spec, "64KiB", rollback_window=4, page_tokens=4)
    cache = PrefixCache(memory, grid_tokens=16)
    for start in range(6):
        sequence, _ = cache.open([start, *[7] * 40])
        memory.run(model, {sequence: [start, *[7] * 40]}, max_tokens=16)
        cache.insert(sequence)
        memory.close(sequence)
    n_before = cache.stats().n_checkpoints
    sequence = memory.open()
    for feed in (
        lambda n: memory.run(model, {sequence: [1] * n}),
        lambda n: memory.step({sequence: [1] * n}).__enter__(),
    ):
        for n_tokens in (900, 20_000):
            with pytest.raises(CapacityError, match="can never hold"):
                feed(n_tokens)
    assert n_before and cache.stats().n_checkpoints == n_before
    memory.run(model, {sequence: [1] * 350}, max_tokens=64)
    assert cache.stats().n_checkpoints < n_before
    memory.check()
