"""A memory on these kernels keeps states behind tails. In plain torch, states move with every token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridmem.memory import HybridMemory
from hybridmem.memory.recurrences import FAMILIES
from tests.tolerances import assert_split_close
from tests.toy import FamilyToy


@pytest.mark.parametrize("family", ["gated_delta", "short_conv", "rwkv7", "mamba1"])
def test_deferred_states(device: torch.device, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence takes a prompt, drafts, a rollback, and single tokens until bodies have moved.

    A fork of it takes other tokens.
    """
    if device.type == "cuda":
        pytest.skip("the toys live on the CPU; conformance runs on the device")
    model = FamilyToy(FAMILIES[family])
    tokens = torch.randint(0, model.memory_spec.vocab_size, (50,)).tolist()

    def run(kernels: str, fold: str) -> Tensor:
        monkeypatch.setenv("HYBRID_MEMORY_KERNELS", kernels)
        memory = HybridMemory(model.memory_spec, "4MiB", rollback_window=8, fold=fold, poison=True)  # type: ignore[arg-type]
        main, logits = memory.open(), []

        def feed(**parts: list[int]) -> None:
            requests = {{"main": main, "other": other}[name]: part for name, part in parts.items()}
            with memory.step(requests, outputs="all") as step:  # type: ignore[arg-type]
                logits.append(model(step))
            memory.check()

        other = main
        feed(main=tokens[:18])
        feed(main=tokens[20:22])
        memory.rollback(main, to=19)
        other = memory.fork(main)
        feed(main=tokens[24:25], other=tokens[25:28])
        for token in tokens[28:30]:
            feed(main=[token], other=[token + 1 if token == 0 else token - 1])
        feed(main=tokens[32:36])
        return torch.cat(logits)

    assert_split_close(run("cuda", "defer"), run("reference", "keep"))


@pytest.mark.parametrize("family", ["gated_delta", "mamba1"])
def test_states_of_8_bits(device: torch.device, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps round the same numbers, so outputs are as close to those of plain torch as with float32 states."""
    if device.type == "cuda":
        pytest.skip("the toys live on the CPU; conformance runs on the device")
    model = FamilyToy(FAMILIES[family])
    tokens = torch.randint(0, model.memory_spec.vocab_size, (40,)).tolist()

    def run(kernels: str) -> Tensor:
        monkeypatch.setenv("HYBRID_MEMORY_KERNELS", kernels)
        memory = HybridMemory(
            model.memory_spec, "4MiB", rollback_window=16, fold="defer", state_dtype="int8", poison=True
        )
        main = memory.open()
        logits = [memory.run(model, {main: tokens[:28]})]
        memory.rollback(main, to=23)
        other = memory.fork(main)
        for t in range(28, 40):
            logits.append(memory.run(model, {main: [tokens[t]], other: [tokens[t - 1]]}))
            memory.check()
        return torch.cat(logits)

    assert_split_close(run("cuda"), run("reference"))


def test_a_run_that_is_longer_than_its_ring(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of its first tokens are still needed when later tokens have taken their slots."""
    if device.type == "cuda":
        pytest.skip("the toys live on the CPU; conformance runs on the device")
    model, logits = FamilyToy(FAMILIES["gated_delta"]), []
    for kernels, fold in (("reference", "keep"), ("cuda", "defer")):
        monkeypatch.setenv("HYBRID_MEMORY_KERNELS", kernels)
        memory = HybridMemory(model.memory_spec, "1MiB", rollback_window=1, fold=fold, poison=True)  # type: ignore[arg-type]
        found = memory.run(model, {memory.open(): [1, 2, 3, 4, 5, 6, 7]}, outputs="all")
        assert found is not None
        logits.append(found)
    assert_split_close(*reversed(logits))
