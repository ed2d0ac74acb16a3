"""The books also note drops, swaps, checkpoints and steps of sequences, in whatever slot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from hybridmem.memory import (
    AttentionSpec,
    BatchError,
    CrossAttentionSpec,
    HybridMemory,
    MemorySpec,
    Sequence,
    SequenceError,
    Step,
)
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.state.tails import TailTable
from tests.inside import drops_of, ledger_of
from tests.toy import Toy

HOST, DRY = Toy(attention=False), Toy(attention=False, device=torch.device("meta"))


def make(model: Toy = DRY, **options: Any) -> HybridMemory:
    return HybridMemory(model.memory_spec, "1MiB", **({"rollback_window": 4} | options))


def fed(memory: HybridMemory, n_tokens: int) -> Sequence:
    sequence = memory.open()
    memory.run(HOST if memory.spec.device.type == "cpu" else None, {sequence: [1] * n_tokens})
    return sequence


def test_each_drop_has_a_number_of_its_own_in_loaded_sequences_too(tmp_path: Path) -> None:
    memory = make(HOST)
    a, b = fed(memory, 30), fed(memory, 30)
    memory.drop(a, 20, 22, approximate=True)
    memory.drop(a, 25, 26, approximate=True)
    assert [at for at, _ in sorted(drops_of(memory, a))] == [20, 25]
    memory.save(a, tmp_path / "a")
    loaded = memory.load(tmp_path / "a")
    memory.drop(b, 3, 5, approximate=True)
    again = memory.load(tmp_path / "a")
    memory.drop(b, 7, 8, approximate=True)
    numbers = [number for s in (a, loaded, b, again) for _, number in drops_of(memory, s)]
    assert len(numbers) == len({*numbers}) == 8 and min(numbers) > 0
    assert [sorted(at for at, _ in drops_of(memory, s)) for s in (loaded, again)] == [[20, 25]] * 2
    memory.drop(a, 10, 11, approximate=True)
    assert [at for at, _ in drops_of(memory, a)] == [10], "what is behind it has changed as a whole"
    fork = memory.fork(a)
    memory.rollback(fork, to=fork.horizon)
    memory.rollback(a, to=0)
    memory.reorder({b: fork})
    assert [len(drops_of(memory, s)) for s in (fork, a, b)] == [1, 0, 1]
    assert ledger_of(memory).record(a.slot)["seams"] == [] and a.is_whole and not b.is_whole
    memory.check()


def test_checkpoints_are_those_of_the_family_that_are_at_hand() -> None:
    memory = make()
    a, stranger = fed(memory, 9), fed(memory, 9)
    marks = [memory.checkpoint(a), memory.checkpoint(memory.fork(a)), memory.checkpoint(a)]
    memory.checkpoint(stranger)
    memory.swap_out(marks[1])
    assert memory.counters.checkpoints(a) == [marks[0], marks[2]]
    memory.swap_in(marks[1])
    assert memory.counters.checkpoints(a) == marks
    assert [memory.can_rollback(a, to=other) for other in (marks[1], stranger, memory.fork(a))] == [True, False, False]
    for other, says in ((stranger, "no checkpoint"), (memory.checkpoint(stranger), "not taken from")):
        with pytest.raises(SequenceError, match=says):
            memory.rollback(a, to=other)
    assert a.length == 9 and all(mark.lineage == a.lineage for mark in marks)


@pytest.mark.parametrize("change", ["swap_out", "close", "step"])
def test_a_step_is_refused_for_what_has_happened_since_it_was_made(change: str) -> None:
    memory = make()
    a, b = fed(memory, 5), fed(memory, 5)
    step, busy = memory.step({a: [1], b: [2]}), memory.step({b: [3]})
    busy.__enter__() if change == "step" else getattr(memory, change)(b)
    says = {"swap_out": "swapped out", "close": "is closed", "step": "open step"}[change]
    with pytest.raises(SequenceError, match=says):
        step.__enter__()
    if change == "step":
        busy.__exit__(None, None, None)
    elif change == "swap_out":
        memory.swap_in(b)
    if change != "close":
        with memory.step({a: [1], b: [2]}):
            pass
        assert (a.length, b.length) == (6, 7 if change == "step" else 6)
    memory.check()


CALLS: dict[str, Callable[[HybridMemory, Sequence], object]] = {
    "check": lambda memory, _: memory.check(), "usage": lambda memory, _: memory.usage(),
    "fork": lambda memory, sequence: memory.close(memory.fork(sequence)),
    "lack of room": lambda memory, sequence: memory.run(None, {memory.open(): [1] * 9}),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_step_that_nobody_has_any_more_ends_at_the_next_call(call: str) -> None:
    memory = HybridMemory(DRY.memory_spec, make().counters.least_bytes, rollback_window=4)
    sequence = memory.open()
    step: Step | None = memory.step({sequence: [1] * 9})
    assert step is not None
    step.__enter__()
    assert memory.counters.used_bytes > 0
    del step
    CALLS[call](memory, sequence)
    assert sequence.length == 0 and (memory.counters.used_bytes == 0) == (call != "lack of room")
    memory.run(None, {memory.sequences[-1]: [1]})
    memory.check()


def test_slots_beyond_the_first_are_like_them() -> None:
    """When the books grow, they keep what they note of a slot.

    This is its length, and whether it is a checkpoint, swapped out, or in a step.
    """
    memory = make()
    sequences = [fed(memory, 3) for _ in range(15)]
    mark = memory.checkpoint(sequences[0])
    memory.swap_out(sequences[1])
    with memory.step({sequences[2]: [5]}):
        more = [memory.open() for _ in range(40)]
        assert sorted(s.slot for s in memory.sequences) == list(range(56))
        with pytest.raises(SequenceError, match="open step"):
            memory.fork(sequences[2])
    with pytest.raises(SequenceError, match="is a checkpoint"):
        memory.step({mark: [1]})
    assert sequences[1].is_swapped and not any(s.is_swapped for s in more)
    memory.run(None, {s: [2] * 4 for s in (*more, sequences[3])})
    assert [s.length for s in (sequences[2], sequences[3], more[-1], mark, sequences[1])] == [4, 7, 4, 3, 3]
    memory.check()
    assert [s.id for s in memory.sequences] == list(range(56)), "ids are counted, and are never used again"
    memory.close(more[0])
    assert memory.open().id == 56
    memory.check()


@pytest.mark.parametrize("call", ["fork", "checkpoint", "open"])
def test_a_copy_that_fails_leaves_no_sequence_behind(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if call == "open":
        layers = ((AttentionSpec(1, 1, 4), CrossAttentionSpec(1, 1, 4)),)
        memory = HybridMemory(MemorySpec(layers, 9, device=torch.device("meta")), "1MiB")
        rows = torch.zeros(5, 1, 4, device="meta")
        sequence = memory.open(encoder=[(rows, rows)])
        with pytest.raises(BatchError, match=r"give its output, open\(encoder="):
            memory.open()
        with pytest.raises(BatchError):
            memory.open(encoder=cast(Any, [(rows[:, :, :2], rows)]))
    else:
        memory = make()
        sequence = fed(memory, 9)
        monkeypatch.setattr(TailTable, "share", lambda *_: [][0])
        with pytest.raises(IndexError):
            getattr(memory, call)(sequence)
    assert memory.sequences == [sequence]
    memory.check()


def test_bytes_that_are_away_are_counted_for_each() -> None:
    memory = make(host_budget="1MiB")
    a, b, c = fed(memory, 3), fed(memory, 30), fed(memory, 3)
    held, horizons = [memory.counters.held_bytes(s) for s in (a, b)], [s.horizon for s in (a, b)]
    assert not any(s.swapped_bytes for s in memory.usage().by_sequence.values())
    memory.swap_out(a)
    memory.swap_out(b)
    usage = memory.usage().by_sequence
    assert [usage[s.id].swapped_bytes for s in (a, b, c)] == [*held, 0] and [s.horizon for s in (a, b)] == horizons
    assert horizons[1] > 0 and sum(memory.counters.swapped_bytes) == sum(held)
    memory.swap_in(b)
    memory.close(a)
    assert sum(memory.counters.swapped_bytes) == 0 and not b.is_swapped and memory.open().length == 0
    memory.check()


def test_a_memory_is_made_as_it_is_written() -> None:
    """The test checks the defaults, and what a run does without options."""
    memory = HybridMemory(Toy().memory_spec, "4MiB")
    assert (memory.rollback_window, memory.page_tokens, memory.budget, memory.is_open) == (32, 16, 4 << 20, True)
    sizes, toy = list[int](), Toy()

    def counting(step: Step) -> torch.Tensor:
        sizes.append(len(step.token_ids))
        return toy(step)

    sequence = memory.open()
    memory.run(counting, {sequence: [1] * 515})
    assert sizes == [512, 3] and sequence.length == 515
    assert memory.needed_bytes(515) == memory.needed_bytes(515, n_held=0, max_tokens=512)
    assert memory.private_bytes(sequence) == memory.usage().used_bytes
    assert isinstance(memory.drop, Callable) and not memory.checkpoint(sequence).is_swapped  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="no reordering"):
        memory.reorder([(sequence, sequence)])  # type: ignore[arg-type]
    memory.reorder({})
    with memory as same:
        assert same is memory
    assert not memory.is_open
    with pytest.raises(SequenceError), memory:
        pass
    memory.close_all()
    cache = PrefixCache(make(HOST))
    assert np.asarray(cache.resumable()).size == 0
