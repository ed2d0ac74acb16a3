"""Arrays on their way to the device. What only a device can show is in `tests/gpu`."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from memory import uploads
from memory.interface import Int64s
from memory.uploads import Stage, Stages, remember, upload
from tests.subjects import make_subject

CPU = torch.device("cpu")


def opened() -> Stage:
    stage = Stage(CPU, [])
    stage.open()
    return stage


def test_arrays_of_a_stage_arrive_together_when_it_is_sent() -> None:
    """Small ones, an empty one, one of two axes, one with room behind it, and one that does not fit beside the others."""
    arrays = [np.arange(3), np.zeros(0, np.int64), np.arange(12).reshape(3, 4), np.arange(50_000), np.array([7])]
    stage, rooms = opened(), [3, 0, 12, 60_000, 1]
    placed = [stage.add(array, room) for array, room in zip(arrays, rooms, strict=True)]
    assert stage.layout is None, "it does not fit, so where it lies is not where the next one will"
    stage.send()
    for array, tensor, room in zip(arrays, placed, rooms, strict=True):
        assert tensor.shape == (array.shape if room == array.size else (room,))
        assert tensor.ravel()[: array.size].tolist() == array.ravel().tolist()
        assert tensor.data_ptr() % 16 == 0, "kernels load 16 bytes at once"
    stage.open()
    again = [stage.add(array, room) for array, room in zip(arrays, rooms, strict=True)]
    layout = stage.layout
    stage.open()
    assert [tensor.data_ptr() for tensor in again] == [stage.add(*each).data_ptr() for each in zip(arrays, rooms, strict=True)]
    assert stage.layout == layout is not None, "it has grown once, and that is enough"


def test_a_stage_takes_arrays_as_they_are_when_they_are_added() -> None:
    stage, array = opened(), np.arange(4)
    placed = stage.add(array, 4)
    array[:] = -1
    stage.send()
    assert placed.tolist() == [0, 1, 2, 3]


def test_a_plan_that_is_handed_over_and_then_fails_leaves_its_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or two steps that are open at the same time would be written over each other."""
    monkeypatch.setattr(uploads, "_PLAYS_DEVICE", True)
    stages = Stages(CPU)
    with pytest.raises(MemoryError), uploads.together(stages) as handed_over:
        raise MemoryError
    assert handed_over is not None
    handed_over.close()  # as the step does that it was handed to
    assert stages.take() is handed_over
    assert stages.take() is not handed_over


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.arange(4)
    tensor = upload(array, torch.device("cpu"))
    array[0] = 9
    assert tensor.tolist() == [9, 1, 2, 3]


def test_what_is_remembered_goes_with_its_anchors() -> None:
    made = list[int]()

    def make() -> int:
        made.append(len(made))
        return len(made)

    first, second = np.arange(2), np.arange(2)
    assert [remember((first, second), "key", make) for _ in range(3)] == [1, 1, 1]
    assert remember((first, second), "other", make) == 2
    assert remember((second, first), "key", make) == 3
    del second
    gc.collect()
    assert remember((first, np.arange(2)), "key", make) == 4


@pytest.mark.parametrize("name", ["toy", "toy-window", "toy-quest", "toy-4-bit", "toy-h2o"])
def test_no_plan_reads_what_has_not_been_sent(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, where a step's arrays go up together when all is planned."""
    subject = make_subject(name, tmp_path)
    steps = [subject.tokens(20), *([t] for t in subject.tokens(12, seed=1)), subject.tokens(5, seed=2)]
    sent, add, send = list[Stage](), Stage.add, Stage.send

    def add_late(stage: Stage, array: Int64s, size: int) -> Tensor:
        """Until it is sent, every number is an offset far outside of any arena."""
        return add(stage, array, size).fill_(1 << 40)

    def send_and_count(stage: Stage) -> None:
        send(stage)
        sent.append(stage)

    def logits() -> Tensor:
        memory = subject.memory()
        return subject.feed(memory, memory.open(), steps)

    expected = logits()
    assert not sent
    monkeypatch.setattr(uploads, "_PLAYS_DEVICE", True)
    monkeypatch.setattr(Stage, "add", add_late)
    monkeypatch.setattr(Stage, "send", send_and_count)
    subject.assert_same(logits(), expected, bits=True)
    assert len(sent) == len(steps)
