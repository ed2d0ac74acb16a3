"""Replayed steps of a draft head are compared with steps that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridmem.memory import Step
from hybridmem.models import load_model
from hybridmem.models.draft_heads import NextTokenHead, RecordedHead
from tests.chat.engines import make_memory
from tests.models.draft_heads.mtp_checkpoints import write_mtp_checkpoint
from tests.models.families.qwen3_5 import qwen3_5_config


@pytest.mark.parametrize("counts", [[1], [3], [2, 2], [1, 3]])
def test_replays_have_the_bits_of_the_steps_they_stand_for(
    counts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows differ from step to step, but are always copied to the same place."""
    write_mtp_checkpoint(tmp_path, qwen3_5_config(), is_often_right=True)
    model: Any = load_model(tmp_path, draft_head=True)
    head, width = model.draft_head, model.config.hidden_size
    n_runs, run = 0, NextTokenHead.in_step_order

    def count(self: NextTokenHead, step: Step, rows_TM: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal n_runs
        n_runs += 1
        return run(self, step, rows_TM)

    monkeypatch.setattr(NextTokenHead, "in_step_order", count)
    recorded, memories = RecordedHead(head), [make_memory(head) for _ in range(2)]
    sequences = [[memory.open() for _ in counts] for memory in memories]
    generator, n_steps = torch.Generator().manual_seed(1), 24
    for _ in range(n_steps):
        rows_TM = torch.randn(sum(counts), width, generator=generator)
        tokens = [torch.randint(0, 40, (n,), generator=generator).tolist() for n in counts]
        found = []
        for call, memory, own in zip((head, recorded), memories, sequences, strict=True):
            with memory.step(dict(zip(own, tokens, strict=True))) as step:
                found.append(call(step, rows_TM))
            for sequence in own:
                memory.rollback(sequence, to=max(0, sequence.length - 1))
        for expected, got in zip(*found, strict=True):
            assert torch.equal(expected, got)
    n_recorded = n_runs - n_steps
    assert n_recorded <= 10 if len({*counts}) == 1 else n_recorded == n_steps
