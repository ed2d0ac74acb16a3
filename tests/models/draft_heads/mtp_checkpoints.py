"""Random checkpoints with modules of multi-token prediction, and transformers' modules with the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_layers import MtpModel

from hybridmem.models.loading.load import names_in_files
from tests.models.checkpoints import randomise_

_QWEN = {
    "enorm.": "mtp.pre_fc_norm_embedding.", "hnorm.": "mtp.pre_fc_norm_hidden.", "eh_proj.": "mtp.fc.",
    "post_norm.": "mtp.norm.",
}  # fmt: skip


@dataclass
class MtpPeer:
    """transformers' model and its module of multi-token prediction."""

    model: Any
    module: MtpModel

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> Tensor:
        """(n, M), after the last norm."""
        return self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def draft(self, hidden_TM: Tensor, next_tokens: list[int]) -> tuple[Tensor, Tensor]:
        """The logits (n, vocab) and hidden states (n, M) of pairs of hidden states and next tokens."""
        positions = torch.arange(1, len(next_tokens) + 1)[None]
        ids = torch.tensor([next_tokens])
        rows = self.module.forward_layer(0, hidden_TM[None], positions, None, input_ids=ids)
        return self.module._project_to_logits(rows)[0], rows[0]


def write_mtp_checkpoint(
    folder: Path, config: PreTrainedConfig, *, nextn: bool = False, is_often_right: bool = False
) -> MtpPeer:
    """Write a model with one such module, under the names of Qwen's files, or of DeepSeek's (`nextn`).

    With `is_often_right`, layers add little, and the module reads little but the token, as the model does.
    """
    torch.manual_seed(7)
    config.num_mtp_layers = 1
    if not nextn:
        config.mtp_layer_types = ["full_attention"]
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise_(model)
    module = MtpModel(model, 1).eval()
    randomise_(module.layers)
    if is_often_right:
        _agree_(model, module)
    model.save_pretrained(folder)
    n_layers, block = config.num_hidden_layers, dict[str, Tensor]()
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in module.layers[0].state_dict().items():
        begin, rest = name.split(".", 1)
        if begin == "mtp_block":
            block[f"model.layers.0.{rest}"] = tensor
        elif nextn:
            own = f"shared_head.norm.{rest}" if begin == "post_norm" else name
            tensors[f"model.layers.{n_layers}.{own}"] = tensor.clone()
        else:
            tensors[_QWEN[f"{begin}."] + rest] = tensor.clone()
    place = f"model.layers.{n_layers}." if nextn else "mtp.layers.0."
    for name, tensor in names_in_files(model, block).items():
        tensors[place + name.removeprefix("model.layers.0.")] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return MtpPeer(model, module)


@torch.no_grad()
def _agree_(model: Any, module: MtpModel) -> None:
    for name, weight in (*model.named_parameters(), *module.layers.named_parameters()):
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            weight *= 0.15
    layer, n_model = module.layers[0], model.config.hidden_size
    layer.eh_proj.weight.copy_(torch.cat([torch.eye(n_model), torch.zeros(n_model, n_model)], 1))
    layer.enorm.weight.zero_()  # It multiplies by one more than this.
    layer.post_norm.weight.copy_(model.model.norm.weight)
