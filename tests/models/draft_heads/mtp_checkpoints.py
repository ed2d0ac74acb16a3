"""Makes random checkpoints with modules of multi-token prediction, and transformers' modules with the same weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.masking_utils import create_causal_mask
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHForCausalLM, NemotronHRMSNorm

from hybridmem.models.loading.load import names_in_files
from tests.models.checkpoints import randomise_

try:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel
except ImportError:
    pytest.skip("transformers before 5.24 has no MtpModel to compare draft heads with", allow_module_level=True)

_QWEN = {
    "enorm.": "mtp.pre_fc_norm_embedding.", "hnorm.": "mtp.pre_fc_norm_hidden.", "eh_proj.": "mtp.fc.",
    "post_norm.": "mtp.norm.",
}  # fmt: skip


@dataclass
class MtpPeer:
    """Holds transformers' model and its module of multi-token prediction, an `MtpModel` or one like it."""

    model: Any
    module: Any
    has_cache: bool = False
    """Whether pairs are read with a cache. Only with it, transformers knows that positions are ahead of the model's."""

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> Tensor:
        """Return hidden states (n, M), after the last norm."""
        return self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def draft(self, hidden_TM: Tensor, next_tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Return the logits (n, vocab) and hidden states (n, M) of pairs of hidden states and next tokens."""
        positions = torch.arange(1, len(next_tokens) + 1)[None]
        ids = torch.tensor([next_tokens])
        cache = MtpCache(config=self.module.config) if self.has_cache else None
        rows = self.module.forward_layer(0, hidden_TM[None], positions, cache, input_ids=ids)
        return self.module._project_to_logits(rows)[0], rows[0]


class _IndexedMtpModel(MtpModel):
    """Is transformers' module with a mask for attention with an index. Transformers 5.24 has no such mask here."""

    def create_masks_for_mtp_layer(self, layer_idx: int, inputs_embeds: Tensor, *_: Any) -> dict[str, Tensor | None]:
        mask = create_causal_mask(self.config, inputs_embeds, attention_mask=None, cache=None)
        return {"attention_mask": mask}


class NemotronModule(torch.nn.Module):
    """Is Nemotron 3's module, made of transformers' blocks, because its `MtpModel` has only one kind of them.

    Blocks are named as in the files. vLLM's `nemotron_h_mtp` shows where the norms are.
    """

    def __init__(self, model: NemotronHForCausalLM, kinds: list[str]) -> None:
        super().__init__()
        config = copy.deepcopy(model.config)
        config.layers_block_type = kinds
        self.layers = torch.nn.ModuleList(NemotronHBlock(config, i) for i in range(len(kinds)))
        n_model, first, last = config.hidden_size, self.layers[0], self.layers[-1]
        for block, name in ((first, "enorm"), (first, "hnorm"), (last, "final_layernorm")):
            block.add_module(name, NemotronHRMSNorm(n_model, eps=config.layer_norm_epsilon))
        first.eh_proj = torch.nn.Linear(2 * n_model, n_model, bias=False)
        self.shared = model

    def forward_layer(self, _: int, hidden_BTM: Tensor, positions: Tensor, cache: None, *, input_ids: Tensor) -> Tensor:
        first, embedded_BTM = self.layers[0], self.shared.get_input_embeddings()(input_ids)
        x_BTM = first.eh_proj(torch.cat([first.enorm(embedded_BTM), first.hnorm(hidden_BTM)], -1))
        mask = create_causal_mask(first.config, x_BTM, attention_mask=None, cache=None)
        for block in self.layers:
            x_BTM = block(x_BTM, attention_mask=mask)
        return self.layers[-1].final_layernorm(x_BTM)

    def _project_to_logits(self, hidden_BTM: Tensor) -> Tensor:
        return self.shared.lm_head(hidden_BTM)


def write_nemotron_checkpoint(folder: Path, config: PreTrainedConfig) -> MtpPeer:
    """Write a model of Nemotron-H with a module of attention and experts, under the names of NVIDIA's files."""
    torch.manual_seed(7)
    config.num_nextn_predict_layers, config._attn_implementation = 1, "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    module = NemotronModule(model, config.mtp_layers_block_type).eval()
    randomise_(model)
    randomise_(module.layers)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    blocks = {f"model.layers.{name}": tensor for name, tensor in module.layers.state_dict().items()}
    for name, tensor in names_in_files(model, blocks).items():
        tensors[name.replace("backbone.layers.", "mtp.layers.")] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return MtpPeer(model, module)


def write_mtp_checkpoint(
    folder: Path, config: PreTrainedConfig, *, nextn: bool = False, is_often_right: bool = False
) -> MtpPeer:
    """Write a model with one such module, under the names of Qwen's files, or of DeepSeek's (`nextn`).

    With `is_often_right`, layers add little, and the module reads almost only the token, as the model does.
    """
    torch.manual_seed(7)
    config.num_mtp_layers = 1
    kinds = getattr(config, "layer_types", None) or []
    indexed = "indexed_attention" in kinds
    config.mtp_layer_types = ["indexed_attention" if indexed else "full_attention"]
    if getattr(config, "mlp_layer_types", None):
        config.mtp_mlp_layer_types = ["sparse"]
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise_(model)
    module = (_IndexedMtpModel if indexed else MtpModel)(model, 1).eval()
    # Layers that share indices return what was chosen as well.
    module.layers[0].mtp_block.register_forward_hook(lambda *x: x[-1][0] if isinstance(x[-1], tuple) else x[-1])
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


def write_inkling_checkpoint(folder: Path, config: PreTrainedConfig, *, as_published: bool) -> MtpPeer:
    """Write a model of Inkling with one module, under the names of published files or of transformers."""
    torch.manual_seed(7)
    config.num_mtp_layers, config._attn_implementation = 1, "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise_(model)
    module = MtpModel(model, 1).eval()  # It copies the embedding.
    randomise_(module.layers)
    if module.use_shared_post_norm:
        randomise_(module.shared_post_norm)
    model.save_pretrained(folder)
    tensors, names = load_file(folder / "model.safetensors"), {"enorm": "embed_norm", "hnorm": "hidden_norm"}
    names = {**names, "eh_proj": "input_proj"} if as_published else {}
    block = dict[str, Tensor]()
    for name, tensor in module.layers[0].state_dict().items():
        begin, rest = name.split(".", 1)
        if begin == "mtp_block":
            block[f"model.layers.0.{rest}"] = tensor
        else:
            tensors[f"model.mtp.layers.0.{names.get(begin, begin)}.{rest}"] = tensor.clone()
    for name, tensor in names_in_files(model, block).items():
        rest = name.removeprefix("model.layers.0.")
        tensors[f"model.mtp.layers.0.transformer_block.{rest}"] = tensor.clone()
    if module.use_shared_post_norm:
        tensors["model.mtp.chain_norm.weight"] = module.shared_post_norm.weight.detach().clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return MtpPeer(model, module, has_cache=True)


@torch.no_grad()
def _agree_(model: Any, module: MtpModel) -> None:
    for name, weight in (*model.named_parameters(), *module.layers.named_parameters()):
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            weight *= 0.15
    layer, n_model = module.layers[0], model.config.hidden_size
    layer.eh_proj.weight.copy_(torch.cat([torch.eye(n_model), torch.zeros(n_model, n_model)], 1))
    layer.enorm.weight.zero_()  # It multiplies by one more than this.
    layer.post_norm.weight.copy_(model.model.norm.weight)
