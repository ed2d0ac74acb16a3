"""Arrays on their way to the device. What only a device can show is in `tests/gpu`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from memory import uploads
from memory.interface import Int64s
from memory.uploads import Stage, remember, upload
from tests.subjects import make_subject


def test_arrays_of_a_stage_arrive_together_when_it_is_sent() -> None:
    """Small ones, an empty one, one of two axes, and one that does not fit beside the others."""
    arrays = [np.arange(3), np.zeros(0, np.int64), np.arange(12).reshape(3, 4), np.arange(50_000), np.array([7])]
    stage = Stage(torch.device("cpu"))
    placed = [stage.add(array) for array in arrays]
    stage.send()
    for array, tensor in zip(arrays, placed, strict=True):
        assert tensor.shape == array.shape and tensor.tolist() == array.tolist()
        assert tensor.data_ptr() % 16 == 0, "kernels load 16 bytes at once"


def test_a_stage_takes_arrays_as_they_are_when_they_are_added() -> None:
    stage, array = Stage(torch.device("cpu")), np.arange(4)
    placed = stage.add(array)
    array[:] = -1
    stage.send()
    assert placed.tolist() == [0, 1, 2, 3]


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


class LateStage(Stage):
    """Until it is sent, every number is an offset far outside of any arena."""

    def add(self, array: Int64s) -> Tensor:
        return super().add(array).fill_(1 << 40)


@pytest.mark.parametrize("name", ["toy", "toy-window", "toy-quest", "toy-4-bit", "toy-h2o"])
def test_no_plan_reads_what_has_not_been_sent(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, where a step's arrays go up together when all is planned."""
    subject = make_subject(name, tmp_path)
    steps = [subject.tokens(20), *([t] for t in subject.tokens(12, seed=1)), subject.tokens(5, seed=2)]
    host, stages = torch.device("cpu"), list[Stage]()

    def logits() -> Tensor:
        memory = subject.memory()
        return subject.feed(memory, memory.open(), steps)

    expected = logits()

    @contextmanager
    def together(device: torch.device) -> Iterator[None]:
        stages.append(LateStage(host))
        with monkeypatch.context() as patch:
            patch.setattr(uploads, "upload", lambda array, device: stages[-1].add(array))
            yield
        stages[-1].send()

    monkeypatch.setattr(uploads, "together", together)
    subject.assert_same(logits(), expected, bits=True)
    assert len(stages) == len(steps)
