"""The residual stream of a model with 16-bit weights is float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridmem.memory import HybridMemory
from hybridmem.models import load_model
from tests.models.checkpoints import CONFIGS, draw_tokens, write_checkpoint


def test_a_deep_model_in_bfloat16_is_nearer_to_float32_than_with_a_stream_of_bfloat16(tmp_path: Path) -> None:
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 24
    folder, tokens = write_checkpoint(tmp_path, config, dtype=torch.bfloat16), draw_tokens(60)

    def logits(model: Any) -> Tensor:
        memory = HybridMemory(model.memory_spec, "8MiB")
        with memory.step({memory.open(): tokens}, outputs="all") as step:
            found: Tensor = model(step)
        return found

    expected, model = logits(load_model(folder, dtype="float32", progress=False)), load_model(folder, progress=False)
    error = (logits(model) - expected).square().mean().sqrt()
    model.residual_dtype = torch.bfloat16  # type: ignore[attr-defined]
    assert error < 0.8 * (logits(model) - expected).square().mean().sqrt()
