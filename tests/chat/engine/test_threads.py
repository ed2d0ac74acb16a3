"""The server decides how many threads its model gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hybridmem.chat.engine.threads import set_threads
from hybridmem.memory import HybridMemory
from tests.toy import Toy


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("milliseconds", "chosen"),
    [
        ({4: 4, 2: 5, 1: 6}, 1),  # The model is small, so more threads are hardly faster.
        ({4: 9, 2: 5, 1: 6}, 1),
        ({4: 20, 2: 22, 1: 40}, 2),
        ({4: 20, 2: 38, 1: 70}, 4),
        ({4: 900, 2: 900, 1: 900}, 4),  # Two threads are not tried, because the start would take long.
        ({4: 2900, 2: 900, 1: 900}, 1),  # The model is large, and the machine is busy.
        ({4: 900, 2: 900, 1: 6}, 1),  # On a busy machine, threads wait for each other.
    ],
)
def test_as_few_threads_as_are_hardly_slower(milliseconds: dict[int, int], chosen: int) -> None:
    toy, now = Toy(), [0.0]

    def model(step: Any) -> Any:
        now[0] += milliseconds[torch.get_num_threads()] / 1e3
        return toy(step)

    memory = HybridMemory(toy.memory_spec, "1MiB")
    assert set_threads(model, memory, clock=lambda: now[0]) == torch.get_num_threads() == chosen  # type: ignore[arg-type]
    assert not memory.sequences and memory.usage().used_bytes == 0
    assert set_threads(model, memory, 3) == torch.get_num_threads() == 3  # type: ignore[arg-type]


def test_nothing_is_measured_with_a_single_processor() -> None:
    torch.set_num_threads(1)
    assert set_threads(Toy(), HybridMemory(Toy().memory_spec, "1MiB"), clock=lambda: pytest.fail("a step")) == 1
