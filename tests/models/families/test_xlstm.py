"""Some files of xLSTM hold several products as one. Transformers 5.24 cannot load them: their initialisation fails."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridmem.memory import BatchError, HybridMemory
from hybridmem.models import attach, load_model
from tests.models.checkpoints import CONFIGS, draw_tokens, write_checkpoint
from tests.models.hf_models import attached, given, hf_model, logits, padded
from tests.tolerances import assert_logits_close

TOKENS = draw_tokens(40)
JOINED = {
    "mlstm_layer.qkv_opreact": ("mlstm_layer.q", "mlstm_layer.k", "mlstm_layer.v", "mlstm_layer.ogate_preact"),
    "mlstm_layer.ifgate_preact": ("mlstm_layer.igate_preact", "mlstm_layer.fgate_preact"),
    "ffn.proj_up_gate_z": ("ffn.proj_up_gate", "ffn.proj_up"),
}


def run(folder: Path) -> Tensor:
    model = load_model(folder)
    memory = HybridMemory(model.memory_spec, "2MiB")
    with memory.step({memory.open(): TOKENS}, outputs="all") as step:
        return model(step)


@pytest.mark.parametrize("name", ["xlstm", "xlstm-biases"])
def test_products_that_files_hold_as_one(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS[name]())
    expected = run(tmp_path)  # The tests of parity compare these logits with transformers'.
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    for i in range(config["num_blocks"]):
        for joined, parts in JOINED.items():
            for kind in ("weight", "bias"):
                found = [f"backbone.blocks.{i}.{part}.{kind}" for part in parts]
                if all(part in tensors for part in found):
                    whole = torch.cat([tensors.pop(part) for part in found])
                    tensors[f"backbone.blocks.{i}.{joined}.{kind}"] = whole
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"weight_mode": "fused"}))
    assert_logits_close(run(tmp_path), expected)


def test_rows_with_padding_and_too_many_tokens_through_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward takes a mask, although `generate` refuses one.

    Prompts that transformers itself would cut are refused.
    """
    tokens, mask = padded(3, 11)
    with attached("xlstm", 2) as (model, cache):
        together = logits(model, tokens, attention_mask=mask, **given(cache))
    assert_logits_close(together[1:], logits(hf_model("xlstm"), tokens[1:]))
    assert_logits_close(together[:1, -3:], logits(hf_model("xlstm"), tokens[:1, -3:]))
    with attached("xlstm", 1) as (model, cache):
        monkeypatch.setattr(model.config, "max_inference_chunksize", 10)
        with pytest.raises(BatchError, match="max_inference_chunksize=10"):
            logits(model, tokens[1:], **given(cache))
        parts = [logits(model, part, **given(cache)) for part in tokens[1:].split([10, 1], 1)]
    assert_logits_close(torch.cat(parts, 1), together[1:])


def test_modules_are_numbered_while_they_are_attached() -> None:
    model = copy.deepcopy(hf_model("xlstm"))
    own = [block.mlstm_layer for block in model.backbone.blocks]
    with attach(model):
        assert [module.layer_idx for module in own] == [0, 1, 2]
    assert not any(hasattr(module, "layer_idx") for module in own)
