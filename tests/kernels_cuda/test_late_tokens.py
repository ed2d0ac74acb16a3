"""The host has not seen these tokens when their step begins.

In the interpreter's processes the host plays the device.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridmem.memory import BatchError, HybridMemory, Sequence
from tests.toy import VOCAB, Toy


@pytest.fixture(autouse=True)
def uncompiled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use plain torch where the host plays the device. Numba would compile all its kernels for these few steps."""
    if device.type == "cpu":
        monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "reference")


@pytest.fixture
def memory(device: torch.device) -> HybridMemory:
    return HybridMemory(Toy(device=device).memory_spec, "1MiB", rollback_window=8, poison=True)


@pytest.fixture
def model(device: torch.device) -> Toy:
    return Toy(device=device)


def opened(memory: HybridMemory, model: Toy, prompts: list[list[int]]) -> tuple[list[Sequence], Tensor]:
    sequences = [memory.open() for _ in prompts]
    with memory.step(dict(zip(sequences, prompts, strict=True))) as step:
        return sequences, model(step)


def test_greedy_text_is_that_of_tokens_on_the_host(memory: HybridMemory, model: Toy) -> None:
    prompts = [[1, 2, 3], [4], [5, 6]]
    (late, logits), (early, other) = (opened(memory, model, prompts) for _ in range(2))
    for _ in range(6):
        with memory.step(zip(late, logits.argmax(-1), strict=True)) as step:
            logits = model(step)
        with memory.step(dict(zip(early, other.argmax(-1).tolist(), strict=True))) as step:
            other = model(step)
        assert torch.equal(logits, other)
        memory.check()
    for a, b, prompt in zip(late, early, prompts, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.tokens.tolist()[: len(prompt)] == prompt


def test_of_any_lengths_some_taken_back(memory: HybridMemory, model: Toy, device: torch.device) -> None:
    (a, b), _ = opened(memory, model, [[1], [2, 3]])
    one, three = torch.tensor(7, device=device), torch.tensor([8, 9, 10], dtype=torch.int32, device=device)
    with memory.step({a: three, b: one}, outputs="all") as step:
        logits = model(step)
        step.accept({a: 2})
    c, d = memory.open(), memory.open()
    with memory.step({c: [1, 8, 9, 10], d: [2, 3, 7]}, outputs="all") as step:
        expected = model(step)
    assert torch.equal(logits, torch.cat([expected[1:4], expected[6:]]))
    assert [a.tokens.tolist(), b.tokens.tolist()] == [[1, 8, 9], [2, 3, 7]]
    memory.run(model, {a: three}, max_tokens=2)
    assert a.tokens.tolist() == [1, 8, 9, 8, 9, 10]


@pytest.mark.parametrize("bad", [VOCAB, -1])
def test_one_that_is_no_token_is_found_on_leaving(
    memory: HybridMemory, model: Toy, device: torch.device, bad: int
) -> None:
    (a, b), _ = opened(memory, model, [[1], [2, 3]])
    with (
        pytest.raises(BatchError, match=f"token {bad} of <sequence 1, 2 tokens> is outside the vocabulary"),
        memory.step({a: torch.tensor([1], device=device), b: torch.tensor([4, bad], device=device)}) as step,
    ):
        assert model(step).isfinite().all()
    memory.check()
    assert [a.tokens.tolist(), b.tokens.tolist()] == [[1], [2, 3]]
    memory.run(model, {a: 1, b: 1})


def test_what_is_no_integer_is_refused_at_once(memory: HybridMemory, device: torch.device) -> None:
    a = memory.open()
    for wrong in (
        torch.ones(2, device=device),
        torch.zeros(1, 1, 2, dtype=torch.int64, device=device),
        torch.ones(0, device=device).long(),
    ):
        with pytest.raises(BatchError):
            memory.step({a: wrong})
