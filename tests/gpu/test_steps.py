"""Only a device can show this: the host never waits for it inside of a step, and a plan is uploaded in one copy."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hybridmem.memory import HybridMemory
from hybridmem.memory.kernels import chosen_kernels
from hybridmem.memory.recorded import RecordedModel
from tests.subjects import Subject

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # Torch warns of its own tools here.
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


COUNTS_EXPERTS = ("jamba", "model:deepseek", "model:qwen3-next")
"""Models that ask the device how many tokens each expert has."""


def decoding(subject: Subject) -> tuple[HybridMemory, list]:  # type: ignore[type-arg]
    """Return sequences of several lengths after two decode steps, so that every kernel is compiled."""
    memory = HybridMemory(subject.spec, "64MiB", rollback_window=8, page_tokens=subject.page_tokens, fold=subject.fold)
    sequences = [memory.open() for _ in range(5)]
    memory.run(subject.model, {s: subject.tokens(20 + i) for i, s in enumerate(sequences)})
    for _ in range(2):
        memory.run(subject.model, {s: [1] for s in sequences})
    return memory, sequences


def test_the_cuda_set_is_chosen(subject: Subject) -> None:
    chosen = chosen_kernels("cuda", subject.spec.dtype)
    assert chosen["paged_attention"].startswith("cuda")


def test_no_step_waits_for_the_device(subject: Subject) -> None:
    if subject.name.startswith(COUNTS_EXPERTS):
        pytest.skip("experts are counted on the host")
    memory, sequences = decoding(subject)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with memory.step({s: [2] for s in sequences}) as step:
            subject.model(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_step_waits_for_pages_in_host_memory(subject: Subject) -> None:
    if subject.name not in ("toy", "model:bamba"):
        pytest.skip("attention with pages alone")
    memory = HybridMemory(subject.spec, "64MiB", rollback_window=8, fold=subject.fold, host_pages="64MiB")
    sequences = [memory.open() for _ in range(5)]
    for sequence in sequences[1::2]:
        memory.to_host(sequence)
    memory.run(subject.model, {s: subject.tokens(20 + i) for i, s in enumerate(sequences)})
    for _ in range(2):
        memory.run(subject.model, {s: [1] for s in sequences})
    torch.cuda.set_sync_debug_mode("error")
    try:
        with memory.step({s: [2] for s in sequences}) as step:
            subject.model(step)
        memory.to_device(sequences[1])
        memory.to_host(sequences[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_replayed_steps_are_the_same_bits(subject: Subject) -> None:
    if subject.fold != "defer":
        pytest.skip("recorded steps are those of states that stay where they are")
    logits, recorded = [], RecordedModel(subject.model)
    for model in (subject.model, recorded):
        memory, sequences = decoding(subject)
        found = []
        for token in range(12):
            with memory.step({s: [token % 7] for s in sequences}) as step:
                found.append(model(step))
            memory.check()
        logits.append(torch.cat(found))
    assert recorded.n_recordings
    assert torch.equal(*logits)


def test_a_plan_goes_up_in_one_copy(subject: Subject) -> None:
    memory, sequences = decoding(subject)
    with memory.step({s: [2] for s in sequences}) as first:
        subject.model(first)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step = memory.step({s: [2] for s in sequences}).__enter__()
        if not subject.name.startswith(COUNTS_EXPERTS):
            subject.model(step)  # The step contains the model alone, and nothing after it.
        torch.cuda.synchronize()
    copies = [event for event in found.events() if "Memcpy HtoD" in event.name]
    assert len(copies) == 1, [event.name for event in copies]
    assert step.token_ids.tolist() == [2] * 5
