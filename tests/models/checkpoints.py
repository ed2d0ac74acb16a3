"""Makes random checkpoints as transformers writes them.

Their weights make attention, both states and the experts matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers.models.xlstm.modeling_xlstm import xLSTMCache

from hybridmem.models.hf.cache import cache_argument
from tests.models.families import CONFIGS
from tests.models.families.vocabulary import VOCAB

__all__ = [
    "CACHE_NAME",
    "CONFIGS",
    "IS_RENAMED",
    "MAMBA_CACHE_NAME",
    "Peer",
    "draw_tokens",
    "randomise_",
    "write_checkpoint",
]


IS_RENAMED = "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
CACHE_NAME, MAMBA_CACHE_NAME = ("cache", "cache") if IS_RENAMED else ("past_key_values", "cache_params")
"""How models of this transformers take a cache: its versions 5.23 and 5.24 differ."""

STATE_LISTS = ("rwkv", "rwkv7")
"""Models that take and give back their states as a list of tensors."""


@torch.no_grad()
def randomise_(model: nn.Module) -> None:
    """Set weights of a trained model's size, instead of those of an initialisation.

    So nothing is close to zero or to the identity.
    """
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(-3, 1)  # Some states hardly fade, some last for one token only, and some are between.
        elif name.endswith("recurrent_param"):
            weight.uniform_(-4, -1)  # RG-LRU's decays have a range like that.
        # These are RG-LRU's. Where its gates close, transformers' 1 - a^2 loses digits.
        elif name.endswith("gate_weight"):
            weight.normal_(0, 0.3 * weight.shape[-1] ** -0.5)
        elif name.endswith("time_decay"):
            weight.uniform_(-4, 1)  # RWKV-4's decays have a range like that.
        elif name.endswith("w_lora.lora.2.bias"):
            weight.uniform_(-6, 1)  # RWKV-7's decays have a range like that.
        elif ".time_mix_" in name or name[:-1].endswith(".x_"):
            weight.uniform_(0, 1)
        elif name.endswith(("dt_proj.bias", "dt_proj_bias")):
            weight.normal_(-1, 0.5)
        elif name.endswith("fgate_preact.bias"):
            weight.uniform_(1, 5)  # xLSTM's decays have a range like that.
        elif name.endswith("igate_preact.bias"):
            weight.normal_(-1, 1)
        elif name.endswith(".temp"):
            weight.normal_(2, 0.3)  # This scales Zaya's keys, which all have the same length.
        elif name.endswith("hyper_connection_mixer.hc_norm.weight"):
            weight.normal_(2, 0.3)  # The mixture of streams is small, and no norm follows it before Qwen4-Exp's head.
        elif "message_gate" in name:
            # In Inkling2Loop, any error would grow from pass to pass.
            weight.normal_(0, 0.4 * weight.shape[-1] ** -0.5)
        elif name.endswith(".sinks"):
            weight.normal_(1, 1)  # Some sinks of gpt-oss outweigh all tokens of a window.
        elif name.endswith(".k_a"):
            weight.normal_(1, 0.2)
        elif "norm" in name or ".ln" in name or ".pre_ln" in name or name.endswith(".D"):
            weight.normal_(float(weight.mean()), 0.2)  # Such weights start at 1, or at 0 if the norm adds the 1.
        elif name.endswith("_scale"):
            weight.normal_(1, 0.2)  # These scale Zaya's residual streams and router rows.
        elif "adapter" in name or (name.endswith(".linear.weight") and "self_attn" not in name):
            # The output of Zamba2's shared blocks is normed, however small it was. So any error in it would grow from
            # block to block.
            weight.normal_(0, 0.25 * weight.shape[-1] ** -0.5)
        elif "embed" in name or name.endswith(("conv1d.weight", "bias")):
            weight.normal_(0, 0.5)
        else:
            weight.normal_(0, 1.2 * weight.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        # These start at zero, where they would decide nothing.
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(0, 0.3)
        # These are Zaya's. Transformers sets the last one to -1 whatever a file says.
        if name.endswith("balancing_biases"):
            buffer[:-1].normal_(-0.7, 0.3)


def write_checkpoint(
    folder: Path, config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """Write a random model of this config to `folder`; `options` go to `save_pretrained`."""
    torch.manual_seed(5)
    model: PreTrainedModel = auto_class(config).from_config(config)
    randomise_(model)
    model.to(dtype).save_pretrained(folder, **options)  # type: ignore[arg-type]
    if hasattr(config, "vision_config"):  # The checkpoint has no tower, as a file for text alone.
        tensors = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if ".visual." not in name}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that makes models of such a config."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


@dataclass
class Peer:
    """Holds the same checkpoint in transformers."""

    model: PreTrainedModel

    @staticmethod
    def load(folder: Path, dtype: torch.dtype = torch.float32) -> Peer:
        auto = auto_class(AutoConfig.from_pretrained(folder))
        return Peer(auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval())

    @torch.no_grad()
    def logits(self, tokens: list[int], cache: PeerCache | None = None) -> Tensor:
        """Return logits (n, vocab). A cache continues where it is.

        With a cache, feed a first prompt or single tokens only.
        """
        options = {"use_cache": False} if cache is None else cache.options(len(tokens))
        output = self.model(torch.tensor([tokens]), **options)
        if cache is not None:
            cache.after(output)
        return output.logits[0]

    def make_cache(self) -> PeerCache:
        return PeerCache(self.model)


def _make_cache(config: PreTrainedConfig) -> Any:
    return DynamicCache(config=config)


_MAKE_CACHE: dict[str, Callable[[PreTrainedConfig], Any]] = {
    "minimax": lambda _: MiniMaxCache(),
    "xlstm": lambda config: xLSTMCache(config, 1, dtype=torch.float32),
}
"""Types of models that have caches of their own."""


@dataclass
class PeerCache:
    """Holds what transformers remembers of one sequence, and knows how models take it."""

    model: PreTrainedModel
    n_tokens: int = 0
    cache: Any = field(init=False)
    state: list[Tensor] | None = None

    def __post_init__(self) -> None:
        self.cache = _MAKE_CACHE.get(self.model.config.model_type, _make_cache)(self.model.config)
        # The model keeps its recurrent states in its modules, not in the cache.
        if self.model.config.model_type == "recurrent_gemma":
            self.model._setup_cache(self.model.config, 1, self.model.device, self.model.dtype)

    def options(self, n_tokens: int) -> dict[str, Any]:
        """Return arguments of the forward call for the next tokens."""
        if self.model.config.model_type in STATE_LISTS:
            return {"use_cache": True, "state": self.state}
        if "position_ids" not in inspect.signature(type(self.model).forward).parameters:
            return {"use_cache": True, cache_argument(self.model): self.cache}
        # Some models number the positions of a continuation from 0 unless told.
        positions = torch.arange(self.n_tokens, self.n_tokens + n_tokens)[None]
        self.n_tokens += n_tokens
        return {"use_cache": True, cache_argument(self.model): self.cache, "position_ids": positions}

    def after(self, output: Any) -> None:
        """Take what a call has returned."""
        if self.model.config.model_type in STATE_LISTS:
            self.state = output.state


def draw_tokens(n_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (n_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
