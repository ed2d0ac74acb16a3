"""A checkpoint without a tail holds one state and a page, and a sequence that returns to it continues exactly.

With fold mode "defer", and after a rollback, there is no state at its position. Then one is computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridmem.memory import (
    AttentionSpec,
    CapacityError,
    HybridMemory,
    MemorySpec,
    RecurrentSpec,
    RollbackError,
    Sequence,
    SpecError,
)
from hybridmem.memory.recurrences import linear_attention_spec, mamba1_spec, rwkv7_spec
from hybridmem.memory.recurrences.registry import FAMILIES
from hybridmem.memory.rotary import UNROTATED
from tests.extent import few_cases, pick
from tests.inside import layer_memories
from tests.toy import VOCAB, FamilyToy, Toy

TEXT = np.random.default_rng(0).integers(0, VOCAB, 400)
DEFERRED = ["ssd", "gated_delta", "kimi_delta", "linear_attention", "mamba1", "rwkv7", "short_conv"]
FOLDS: Any = ["keep", "replay", *(f"defer, {family}" for family in DEFERRED)]
DRY_FOLDS: Any = ["keep", "replay", "defer"]


def make(fold: Any, **options: Any) -> tuple[HybridMemory, Any]:
    fold, _, family = fold.partition(", ")
    model = FamilyToy(FAMILIES[family]) if family else Toy()
    usual = {"budget": "8MiB", "rollback_window": 8, "page_tokens": 4, "poison": True}
    return HybridMemory(model.memory_spec, fold=fold, **usual | options), model


def with_marks(memory: HybridMemory, model: Any, *positions: int) -> tuple[Sequence, list[Sequence]]:
    sequence, marks = memory.open(), []
    for position in positions:
        memory.run(model, {sequence: TEXT[sequence.length : position]})
        marks.append(memory.checkpoint(sequence, holds_tail=False))
    memory.run(model, {sequence: TEXT[sequence.length : sequence.length + 40]})
    return sequence, marks


@few_cases
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("counts", [[1] * pick(12, 30), [40], [3, 9, 1, 20, 2], [7, 8, 8, 9]], ids=str)
def test_who_returns_to_a_slimmed_one_goes_on_exactly(fold: Any, counts: list[int]) -> None:
    """Checkpoints are at fold points and beside them.

    Sequences return in place and by a fork, then take steps of any lengths and rollbacks.
    """
    memory, model = make(fold)
    sequence, marks = with_marks(memory, model, 5, 8, 16, 29, 41, 48)
    memory.check()
    for i, mark in enumerate(marks):
        fork = memory.fork(mark) if i % 2 else sequence
        memory.rollback(fork, to=mark)
        own, fresh = make(fold)[0], mark.length
        anew = own.open()
        own.run(model, {anew: TEXT[:fresh]})
        for n in counts:
            tokens = TEXT[fork.length : fork.length + n]
            assert torch.allclose(memory.run(model, {fork: tokens}), own.run(model, {anew: tokens}), atol=1e-4)
            memory.check()
        memory.rollback(fork, n_tokens=8)
        own.rollback(anew, n_tokens=8)
        assert torch.allclose(memory.run(model, {fork: [3, 4]}), own.run(model, {anew: [3, 4]}), atol=1e-4)
        memory.check()
    assert [mark.horizon for mark in marks] == [mark.length for mark in marks]


@pytest.mark.parametrize("fold", FOLDS)
def test_it_reaches_its_own_position_and_no_other(fold: Any) -> None:
    memory, model = make(fold)
    sequence, (mark,) = with_marks(memory, model, 30)
    assert memory.resume_point(sequence, 26) == 0 and memory.resume_point(sequence, 33) == 30
    memory.rollback(sequence, to=30)
    memory.check()
    with pytest.raises(RollbackError) as caught:
        memory.rollback(sequence, n_tokens=1)
    assert caught.value.horizon == 30
    memory.rollback(sequence, to=mark)


def dry(spec: RecurrentSpec) -> MemorySpec:
    attention = AttentionSpec(4, 2, 8, rotation=UNROTATED)
    return MemorySpec(((spec,), (attention,), (spec,)), VOCAB, device=torch.device("meta"))


@pytest.mark.parametrize("fold", DRY_FOLDS)
@pytest.mark.parametrize("spec", [mamba1_spec(256, 16, 4), linear_attention_spec(4, 32, 32), rwkv7_spec(4, 32)])
def test_each_holds_a_state_and_a_page(fold: Any, spec: Any) -> None:
    """A budget for 30 such checkpoints holds 30, beside the sequence and a step.

    Nothing else is closed.
    """
    layers = dry(spec)
    roomy = HybridMemory(layers, "1TiB", rollback_window=32, fold=fold)
    sizes = {pool.name: pool.block_bytes for pool, _ in layer_memories(roomy).pools}
    state, page = sizes["states"], sizes["pages"]
    sequence, marks = roomy.open(), []
    for _ in range(30):
        roomy.run(None, {sequence: np.ones(100, np.int64)})
        marks.append(roomy.checkpoint(sequence, holds_tail=False))
        assert roomy.private_bytes(marks[-1]) == (state if fold == "defer" else 0)
    roomy.run(None, {sequence: np.ones(100, np.int64)})
    roomy.check()
    assert max(roomy.private_bytes(mark) for mark in marks) <= state + page
    assert roomy.usage().used_bytes <= roomy.needed_bytes(3200) + 30 * (state + page)


@pytest.mark.parametrize("fold", DRY_FOLDS)
def test_tokens_can_be_dropped_behind_it(fold: Any) -> None:
    memory = HybridMemory(dry(linear_attention_spec(4, 32, 32)), "8MiB", rollback_window=8, fold=fold, page_tokens=4)
    _, (mark,) = with_marks(memory, None, 30)
    for start, end in ((2, 9), (20, 30), (29, 30), (31, 40)):
        fork = memory.fork(mark)
        memory.run(None, {fork: TEXT[30:45]})
        memory.drop(fork, start, end, approximate=True)
        memory.check()
        memory.run(None, {fork: TEXT[50:90]})
        memory.check()
        again = memory.checkpoint(fork, holds_tail=False)
        memory.run(None, {fork: TEXT[90:110]})
        memory.check()
        memory.rollback(fork, to=again)
        memory.run(None, {fork: [1] * 30})
        memory.check()


@pytest.mark.parametrize("fold", FOLDS)
def test_it_can_be_saved_and_swapped(fold: Any, tmp_path: Path) -> None:
    memory, model = make(fold)
    _, (mark,) = with_marks(memory, model, 30)
    path = tmp_path / "slim.safetensors"
    memory.save(mark, path)
    loaded, fork = memory.load(path), memory.fork(mark)
    expected = memory.run(model, {memory.fork(mark): TEXT[30:50]})
    memory.swap_out(mark)
    memory.check()
    memory.swap_in(mark)
    assert loaded.horizon == mark.horizon == 30
    for each in (loaded, fork, memory.fork(mark)):
        assert torch.allclose(memory.run(model, {each: TEXT[30:50]}), expected, atol=1e-4)
        memory.check()


@pytest.mark.parametrize("fold", FOLDS)
def test_a_state_within_the_tail_is_computed_and_the_tail_let_go(fold: Any) -> None:
    """What the sequence and its forks hold stays the same, bit for bit.

    They continue beside it.
    """
    memory, model = make(fold)
    sequence, _ = with_marks(memory, model, 30)
    ahead = memory.fork(sequence)
    memory.rollback(sequence, n_tokens=3)
    plain, mark = memory.fork(sequence), memory.checkpoint(sequence)
    memory.check()
    assert mark.horizon == mark.length == sequence.length > sequence.horizon
    from_mark = memory.fork(mark)
    states = torch.stack([memory.run(model, {each: [5, 7, 1]}) for each in (plain, sequence, from_mark)])
    assert torch.equal(states[0], states[1]) and torch.allclose(states[0], states[2], atol=1e-4)
    own = make(fold)[0]
    anew = own.open()
    own.run(model, {anew: ahead.tokens})
    assert torch.allclose(memory.run(model, {ahead: [2]}), own.run(model, {anew: [2]}), atol=1e-4)
    memory.check()
    with pytest.raises(SpecError, match="True or False"):
        memory.checkpoint(sequence, holds_tail="no")  # type: ignore[arg-type]


def test_without_room_for_a_state_it_is_refused_unless_it_holds_the_tail() -> None:
    """Then nothing has changed.

    The budget that the error names is enough.
    """
    memory, model = make("defer, ssd", budget="24KiB")
    sequence, marks = memory.open(), list[Sequence]()
    memory.run(model, {sequence: TEXT[:30]})
    with pytest.raises(CapacityError, match="computed from its tail unless holds_tail=True") as caught:
        while True:
            marks.append(memory.checkpoint(sequence))
    memory.check()
    large = memory.checkpoint(sequence, holds_tail=True)
    assert marks and large.horizon == sequence.horizon < 30 == marks[-1].horizon
    for mark in marks[1:]:
        memory.close(mark)
    for mark in (marks[0], large):
        memory.rollback(sequence, to=mark)
        assert memory.run(model, {sequence: [1]}).isfinite().all()
    n_bytes = int(str(caught.value).split("larger budget, of ")[1].split()[0].replace(",", ""))
    roomy, model = make("defer, ssd", budget=n_bytes)
    sequence = roomy.open()
    roomy.run(model, {sequence: TEXT[:30]})
    assert [roomy.checkpoint(sequence).horizon for _ in range(len(marks) + 1)] == [30] * (len(marks) + 1)


def test_a_memory_on_which_no_model_has_run_holds_the_tail(tmp_path: Path) -> None:
    memory, model = make("defer, ssd")
    sequence = memory.open()
    memory.run(model, {sequence: TEXT[:30]})
    memory.save(sequence, tmp_path / "one.safetensors")
    other = make("defer, ssd")[0]
    loaded = other.load(tmp_path / "one.safetensors")
    assert other.checkpoint(loaded).horizon == loaded.horizon < 30
    other.run(model, {loaded: [1]})
    assert other.checkpoint(loaded).horizon == 31


def test_a_budget_that_an_error_names_is_enough_for_who_returned() -> None:
    memory, model = make("keep", budget="48KiB")
    sequence, marks = with_marks(memory, model, 12, 30, 50)
    forks = [memory.fork(mark) for mark in marks]
    with pytest.raises(CapacityError) as caught:
        while True:
            memory.run(model, dict.fromkeys(forks, [1] * 9))
    memory.check()
    assert caught.value.needed > caught.value.free
    assert sequence.length == 90
