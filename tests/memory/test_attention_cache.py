"""Steps of several requests use pages of attention that others share, and some steps fail."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from hybridmem.memory import AttentionSpec, DropError, HybridMemory, MemorySpec, RollbackError, Rotation, Sequence
from hybridmem.memory import attention_cache as cache_module
from hybridmem.memory.attention_cache import AttentionCache
from hybridmem.memory.blocks import table as table_module
from tests.inside import layer_memories, peak_of
from tests.toy import Toy

PAGE, ROLLBACK, WINDOW = 4, 3, 6
HALF = Rotation((1.0, 0.4))
DRY = MemorySpec(
    ((AttentionSpec(2, 1, 4, rotation=HALF),), (AttentionSpec(2, 1, 4, window=WINDOW, rotation=HALF),)), 19,
    device=torch.device("meta"),
)  # fmt: skip


def make(spec: MemorySpec, budget: int | str = "1MiB") -> HybridMemory:
    return HybridMemory(spec, budget, rollback_window=ROLLBACK, page_tokens=PAGE, poison=True)


def feed(
    memory: HybridMemory, model: Toy, requests: Mapping[Sequence, list[int]], kept: Mapping[Sequence, int] = {}
) -> list[torch.Tensor]:
    with memory.step(requests, outputs="all") as step:
        parts = list(step.split(model(step)))
        step.accept(kept)
    memory.check()
    return parts


@pytest.mark.parametrize("window", [None, WINDOW])
def test_each_request_is_as_it_would_be_alone(window: int | None) -> None:
    """The steps have prompts of several pages, single tokens, and tokens that are not kept.

    Some requests are forks that share a last page.
    """
    rng, model = random.Random(2), Toy(recurrent=False, window=window)
    memory = make(model.memory_spec)
    told: dict[Sequence, list[list[int]]] = {memory.open(): [], memory.open(): [], memory.open(): []}
    for i in range(10):
        if i % 4 == 2:
            source = rng.choice([*told])
            told[memory.fork(source)] = [*told[source]]
        sizes = (1, 1, 2) if i % 3 == 1 else (1, 3, 5, 11)
        chosen = rng.sample([*told], rng.randint(1, len(told)))
        requests = {s: [rng.randrange(19) for _ in range(rng.choice(sizes))] for s in chosen}
        kept = {s: len(tokens) - rng.randint(0, min(2, len(tokens))) for s, tokens in requests.items()}
        found = feed(memory, model, requests, kept)
        for (s, tokens), logits in zip(requests.items(), found, strict=True):
            own = make(model.memory_spec)
            twin = own.open()
            for fed in told[s]:
                feed(own, model, {twin: fed})
            assert torch.equal(feed(own, model, {twin: tokens})[0], logits)
            told[s] += [tokens[: kept[s]]] if kept[s] else []
    assert len(told) == 5 and all(s.tokens.tolist() == [*chain(*fed)] for s, fed in told.items())


class _NoMemory:
    """Stands for numpy when there is no memory for new arrays."""

    def __getattr__(self, name: str) -> Any:
        if name == "empty":
            raise MemoryError
        return getattr(np, name)


def test_a_commit_needs_no_memory_for_page_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has made room.

    Sequences grow, share all their pages, or have a last page that is copied.
    """
    memory = make(DRY)
    growing = memory.open()
    for length in range(1, 60):
        others = [memory.fork(growing)] if length % 3 == 0 else []
        with monkeypatch.context() as patch, memory.step({s: [1] * (1 + length % 6) for s in (growing, *others)}):
            patch.setattr(table_module, "np", _NoMemory())
        memory.check()
        for other in others:
            memory.close(other)


@pytest.mark.parametrize("fails", ["PagedBatch", "_copy_moved"])
def test_a_plan_that_fails_gives_its_pages_back(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Toy(recurrent=False)
    spec = model.memory_spec if fails == "PagedBatch" else rotated(model.memory_spec)
    memory = make(spec)
    sequence = memory.open()
    feed(memory, model, {sequence: [1] * 9}) if fails == "PagedBatch" else run(memory, sequence, 9)
    fork, before = memory.fork(sequence), memory.counters.used_bytes
    owner = cache_module if fails == "PagedBatch" else AttentionCache
    with monkeypatch.context() as patch:
        patch.setattr(owner, fails, lambda *_: [][0])
        with pytest.raises(IndexError):
            if fails == "PagedBatch":
                feed(memory, model, {sequence: [2] * 9, fork: [3]})
            else:
                memory.drop(sequence, 2, 4)
    memory.check()
    assert memory.counters.used_bytes == before and sequence.tokens.tolist() == [1] * 9


def rotated(spec: MemorySpec) -> MemorySpec:
    return MemorySpec(((AttentionSpec(6, 2, 4, rotation=HALF),), (), ()), spec.vocab_size, model=spec.model)


def run(memory: HybridMemory, sequence: Sequence, n_tokens: int) -> None:
    with memory.step({sequence: [1] * n_tokens}) as step:
        step.attend(0, torch.ones(n_tokens, 6, 4), torch.ones(n_tokens, 2, 4), torch.ones(n_tokens, 2, 4))


def histories() -> Iterator[tuple[HybridMemory, Sequence]]:
    """Return a memory and a sequence of it after each of many operations, including drops."""
    rng, memory = random.Random(5), make(DRY)
    live = [memory.open()]
    memory.run(None, {live[0]: [1] * 40})
    for _ in range(120):
        sequence, name = rng.choice(live), rng.choice(["feed", "feed", "back", "fork", "drop"])
        if name == "feed":
            memory.run(None, {s: [1] * rng.choice([1, 2, 9]) for s in {sequence, live[0]}})
        elif name == "back":
            memory.rollback(sequence, to=rng.randint(sequence.horizon, sequence.length))
        elif name == "fork" and len(live) < 6:
            live.append(memory.fork(sequence))
        elif name == "drop" and sequence.length > 20:
            at = rng.choice([1, sequence.horizon])
            with suppress(DropError):
                memory.drop(sequence, at, at + rng.randint(1, 3))
        memory.check()
        yield memory, sequence


def test_pages_and_rows_are_those_of_a_plain_model() -> None:
    n_dropped = 0
    for memory, sequence in histories():
        layers, length, peak = layer_memories(memory), sequence.length, peak_of(memory, sequence)
        for group, window in zip(memory.counters.inventory(sequence).groups, (None, WINDOW), strict=True):
            (holding,), name = group.holdings, "pages" if window is None else f"pages over {WINDOW}"
            first = 0 if window is None else max(0, peak - ROLLBACK - WINDOW + 1) // PAGE
            (start,) = holding.starts.tolist()
            assert (holding.pool, holding.part, holding.ends) == (name, "body", None)
            assert len(holding.ids) == -(-length // PAGE) - first and first * PAGE <= start < max(1, (first + 1) * PAGE)
            n_dropped += start > first * PAGE
            (own,) = [memory for memory in layers.values() if memory.pool.name == name]
            positions = range(first * PAGE, -(-length // PAGE) * PAGE)
            rows = own.live_rows(sequence.slot, length)[name]
            assert rows.ravel().tolist() == [start <= position < length for position in positions]
            assert own.horizon(sequence.slot) == (start + WINDOW - 1 if start and window else 0)
            assert own.blocks_of(sequence.slot)[name].tolist() == holding.ids.tolist()
            assert own.first_pages(np.array([sequence.slot])).tolist() == [first]
    assert n_dropped > 10, "rows before the oldest were dropped from a first page"


def test_tokens_can_be_taken_back_in_a_step_where_they_could_be_behind_it() -> None:
    n_refused = 0
    for i, (memory, sequence) in enumerate(histories()):
        if i % 9:
            continue
        fork, length = memory.fork(sequence), sequence.length
        with memory.step({fork: [1] * 9}):
            pass
        horizon = fork.horizon
        memory.close(fork)
        for n_kept in range(1, 10, 2):
            fork = memory.fork(sequence)
            with memory.step({fork: [1] * 9}) as step:
                if length + n_kept < horizon:
                    n_refused += 1
                    with pytest.raises(RollbackError):
                        step.accept({fork: n_kept})
                else:
                    step.accept({fork: n_kept})
            memory.check()
            memory.close(fork)
    assert n_refused > 10
