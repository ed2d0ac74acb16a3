"""Qwen3.5 is read in the layouts in which its checkpoints are published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedConfig, Qwen3_5Config, Qwen3_5MoeConfig

from hybridmem.memory import HybridMemory
from hybridmem.models import load_model
from tests.models.checkpoints import Peer, draw_tokens, randomise_, write_checkpoint
from tests.models.families.qwen3_5 import EYES, qwen3_5_config, qwen3_5_moe_config
from tests.tolerances import assert_logits_close

TOKENS = draw_tokens(30)


def run(folder: Path) -> Tensor:
    model = load_model(folder)
    memory = HybridMemory(model.memory_spec, "2MiB", poison=True)
    with memory.step({memory.open(): TOKENS}, outputs="all") as step:
        return model(step)


def test_experts_may_be_stacked(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, qwen3_5_moe_config())
    one_by_one = run(folder)
    tensors = load_file(folder / "model.safetensors")
    layers = sorted({name.split(".mlp.experts.")[0] for name in tensors if ".mlp.experts." in name})
    for prefix in (f"{layer}.mlp.experts" for layer in layers):
        gate, up, down = (
            [tensors.pop(f"{prefix}.{i}.{x}_proj.weight") for i in range(3)] for x in ("gate", "up", "down")
        )
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([torch.stack(gate), torch.stack(up)], 1)
        tensors[f"{prefix}.down_proj"] = torch.stack(down)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert layers and torch.equal(run(folder), one_by_one)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("whole, text", [(Qwen3_5Config, qwen3_5_config), (Qwen3_5MoeConfig, qwen3_5_moe_config)])
def test_of_a_model_that_sees_the_language_model_is_read(
    tmp_path: Path, whole: type[PreTrainedConfig], text: Callable[..., PreTrainedConfig], is_tied: bool
) -> None:
    """Its text config and its outer config disagree about tied weights. The outer one is right."""
    inner = text(tie_word_embeddings=not is_tied).to_dict()
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(
        whole(text_config=inner, vision_config=EYES, tie_word_embeddings=is_tied)
    ).eval()
    randomise_(model)
    model.save_pretrained(tmp_path)
    logits = run(tmp_path)
    assert_logits_close(logits, Peer(model).logits(TOKENS))
