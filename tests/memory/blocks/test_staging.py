"""Arrays are staged on their way to the device. `tests/gpu` has what only a device can show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridmem.memory.blocks import staging as uploads
from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.staging import Stage, Stages, in_one_copy, place, upload
from tests.subjects import make_subject

HOST = torch.device("cpu")


@pytest.fixture
def stage() -> Stage:
    stage = Stage(HOST, Stages(HOST))
    stage.open()
    return stage


def test_arrays_of_a_stage_arrive_together_when_it_is_sent(stage: Stage) -> None:
    """The arrays are small, empty, of two axes, or too large to fit beside the others."""
    arrays = [np.arange(3), np.zeros(0, np.int64), np.arange(12).reshape(3, 4), np.arange(50_000), np.array([7])]
    placed = [stage.add(array, array.size) for array in arrays]
    stage.send()
    for array, tensor in zip(arrays, placed, strict=True):
        assert tensor.shape == array.shape and tensor.tolist() == array.tolist()
        assert tensor.data_ptr() % 16 == 0, "kernels load 16 bytes at once"


def test_a_stage_takes_arrays_as_they_are_when_they_are_added(stage: Stage) -> None:
    array = np.arange(4)
    placed = stage.add(array, 4)
    array[:] = -1
    stage.send()
    assert placed.tolist() == [0, 1, 2, 3]


def test_a_plan_that_is_handed_over_and_then_fails_leaves_its_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two steps that are open at the same time would overwrite each other's plans."""
    monkeypatch.setattr(uploads, "is_apart", lambda device: True)
    stages = Stages(HOST)
    with pytest.raises(MemoryError), in_one_copy(stages) as handed_over:
        raise MemoryError
    assert handed_over is not None
    handed_over.close()  # A step that gets a stage closes it, too.
    assert stages.take() is handed_over
    assert stages.take() is not handed_over


def test_plans_of_one_layout_lie_at_one_place(stage: Stage) -> None:
    """This also holds if one array has grown within its room.

    A plan that does not fit has no place, and finds more room the next time.
    """

    def plan(*arrays: Int64s, room: int = 8) -> tuple[object, list[int]]:
        stage.open()
        placed = [stage.add(array, max(room, array.size)) for array in arrays]
        stage.send()
        for array, tensor in zip(arrays, placed, strict=True):
            assert tensor[: array.size].tolist() == array.tolist()
        stage.close()
        return stage.layout, [tensor.data_ptr() for tensor in placed]

    first, where = plan(np.arange(3), np.arange(5))
    assert plan(np.arange(4), np.arange(5)) == (first, where)
    assert plan(np.arange(9), np.arange(5))[0] not in (first, None)
    assert plan(np.arange(40_000), np.arange(5))[0] is None
    large, where = plan(np.arange(40_000), np.arange(5))
    assert large is not None and plan(np.arange(40_000), np.arange(5)) == (large, where)
    assert plan(np.arange(3), np.arange(5))[0] not in (first, None), "the place is another one"


def test_a_plan_that_is_done_leaves_its_place_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "is_apart", lambda device: True)
    stages = Stages(HOST)
    with in_one_copy(stages) as stage:
        placed = place(np.arange(4), HOST)
    assert stage is not None and placed.host.tolist() == placed.device.tolist() == [0, 1, 2, 3]
    stage.close()
    with in_one_copy(stages) as again:
        assert again is stage
        assert upload(np.arange(4, 8), HOST).data_ptr() == placed.device.data_ptr()


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.arange(4)
    tensor = upload(array, torch.device("cpu"))
    array[0] = 9
    assert tensor.tolist() == [9, 1, 2, 3]


class LateStage(Stage):
    """Until this stage is sent, every number is an offset far outside of any arena."""

    def add(self, array: Int64s, size: int) -> Tensor:
        return super().add(array, size).fill_(1 << 40)


@pytest.mark.parametrize("name", ["toy", "toy-window", "toy-quest", "toy-4-bit", "toy-h2o"])
def test_no_plan_reads_what_has_not_been_sent(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device behaves like this stage: a step's arrays are uploaded together, when everything is planned."""
    subject = make_subject(name, tmp_path)
    steps = [subject.tokens(20), *([t] for t in subject.tokens(12, seed=1)), subject.tokens(5, seed=2)]
    taken = list[Stage]()

    def logits() -> Tensor:
        memory = subject.memory()
        return subject.feed(memory, memory.open(), steps)

    def take(stages: Stages) -> Stage:
        taken.append(LateStage(HOST, Stages(HOST)))
        return taken[-1]

    expected = logits()
    monkeypatch.setattr(uploads, "is_apart", lambda device: True)
    monkeypatch.setattr(Stages, "take", take)
    subject.assert_same(logits(), expected, bits=True)
    assert len(taken) == len(steps)
