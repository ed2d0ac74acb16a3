"""The trainer that the guide shows learns what transformers' own learns from the same batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hybridmem.memory.training import Tape
from hybridmem.models import Trainable
from tests.docs.pages import NOT_RUN, ROOT, read_blocks
from tests.memory.training import peers
from tests.models.checkpoints import draw_tokens

pytest.importorskip("accelerate", reason="pip install accelerate")


def batch() -> list[dict[str, torch.Tensor]]:
    """Return texts of 12 and 9 tokens, without a loss for the first four. The shorter one is padded on the left."""
    texts = []
    for n_tokens in (12, 9, 11, 12):
        ids = torch.tensor([0] * (12 - n_tokens) + draw_tokens(n_tokens, seed=n_tokens))
        mask = (torch.arange(12) >= 12 - n_tokens).long()
        texts.append({"input_ids": ids, "attention_mask": mask, "labels": ids.where(torch.arange(12) >= 4, -100)})
    return texts


def test_the_trainer_of_the_guide(tmp_path: Path) -> None:
    (block,) = [b for b in read_blocks(ROOT / "docs/how-to/training.md") if b.title.startswith(NOT_RUN)]
    names: dict[str, Any] = {"Tape": Tape, "Trainable": Trainable, "torch": torch}
    exec(block.code, names)
    own = peers.random_model("llama")
    theirs = copy.deepcopy(own)
    options = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True, optim="sgd",
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in own.named_parameters()}
    for trainer, model in ((names["TapeTrainer"], own), (Trainer, theirs)):
        trainer(model, options, train_dataset=batch(), eval_dataset=batch()).train()
    assert any((p - before[name]).abs().max() > 1e-3 for name, p in own.named_parameters())
    for (name, p), expected in zip(own.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, expected, atol=1e-5), name
    evaluated = names["TapeTrainer"](own, options, eval_dataset=batch()).evaluate()["eval_loss"]
    assert evaluated == pytest.approx(Trainer(theirs, options, eval_dataset=batch()).evaluate()["eval_loss"], rel=1e-4)
