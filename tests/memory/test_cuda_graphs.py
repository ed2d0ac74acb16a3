"""The model may be recorded, but nothing is recorded here. tests/kernels_cuda/test_graphs.py has the rest."""

from __future__ import annotations

import copy

import pytest
import torch

from hybridmem.memory import HybridMemory, SpecError
from hybridmem.memory.blocks.staging import room_for
from hybridmem.memory.recorded import RecordedModel
from tests.toy import Toy


def test_on_the_cpu_the_model_runs_as_ever() -> None:
    model = Toy()
    recorded, memory = RecordedModel(model), HybridMemory(model.memory_spec, "1MiB")
    assert recorded.memory_spec is model.memory_spec
    expected, found = (memory.run(m, {memory.open(): [1, 2, 3]}) for m in (model, recorded))
    assert expected is not None and found is not None and torch.equal(expected, found)
    with pytest.raises(AttributeError):
        recorded.no_such_thing  # noqa: B018
    assert copy.copy(recorded).memory_spec is model.memory_spec


def test_a_recording_at_least() -> None:
    for most in (0, True, 2.5):
        with pytest.raises(SpecError, match="at least 1"):
            RecordedModel(Toy(), most=most)  # type: ignore[arg-type]


def test_room_is_the_same_for_numbers_that_are_near() -> None:
    rooms = [room_for(n) for n in range(5000)]
    assert all(n <= room <= n + max(16, n / 8) for n, room in enumerate(rooms))
    assert len(set(rooms)) < 100


def test_what_stands_for_a_step_while_it_is_recorded_has_notes_of_its_own() -> None:
    """A recording must itself compute what its layers share.

    The step must not keep what the recording will write.
    """
    model = Toy()
    memory = HybridMemory(model.memory_spec, "1MiB")
    with memory.step({memory.open(): [1, 2]}) as step:
        step.notes["angles"] = "the step's"
        with step.while_captured() as twin:
            assert not twin.notes
            twin.notes["angles"] = "the recording's"
        assert step.notes == {"angles": "the step's"} and not twin.notes
        model(step)
    assert not step.notes
