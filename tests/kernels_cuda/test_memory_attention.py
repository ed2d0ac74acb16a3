"""Every kind of attention memory on these kernels gives what it gives in plain torch.

The sequences take prompts, drafts, a rollback, forks and single tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridmem.memory import HybridMemory
from tests.subjects import Subject, make_subject


def outputs(subject: Subject) -> Tensor:
    memory = HybridMemory(subject.spec, "8MiB", rollback_window=8, page_tokens=subject.page_tokens, poison=True)
    main, tokens, logits = memory.open(), subject.tokens(60), []

    def feed(requests: dict) -> None:  # type: ignore[type-arg]
        with memory.step(requests, outputs="all") as step:
            logits.append(subject.model(step))
        memory.check()

    feed({main: tokens[:23]})
    feed({main: tokens[23:28]})
    memory.rollback(main, to=25)
    other = memory.fork(main)
    feed({main: tokens[28:29], other: tokens[29:32]})
    for token in tokens[32:34]:
        feed({main: [token], other: [token]})
    feed({other: tokens[34:40]})
    return torch.cat(logits)


@pytest.mark.parametrize("name", ["toy-window", "toy-attention-h2o-4-bit", "toy-attention-8-bit", "model:deepseek-v3"])
def test_memories_are_as_in_plain_torch(
    device: torch.device, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = make_subject(name, tmp_path, device)
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "reference")
    expected = outputs(subject)
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "triton")
    subject.assert_same(outputs(subject), expected)
