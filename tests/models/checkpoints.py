"""Random checkpoints as transformers writes them, with weights under which attention, both states and the experts all matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, JambaConfig, JambaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

VOCAB = 53


def jamba_config(**options: Any) -> JambaConfig:
    """Attention, Mamba, experts and plain MLPs in three layers, unless `options` say otherwise."""
    defaults = {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 3, "num_experts_per_tok": 3, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_dt_rank": 3,
    }  # fmt: skip
    return JambaConfig(**(defaults | options))


def mamba_config(**options: Any) -> MambaConfig:
    return MambaConfig(**({"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3} | options))


JAMBAS: dict[str, Callable[[], JambaConfig]] = {
    "jamba": jamba_config,
    "jamba-two-of-four-experts": lambda: jamba_config(
        num_hidden_layers=4, num_key_value_heads=6, attn_layer_period=2, attn_layer_offset=0, expert_layer_period=3,
        expert_layer_offset=2, num_experts=4, num_experts_per_tok=2, mamba_d_state=5, mamba_d_conv=2, mamba_conv_bias=False,
        mamba_proj_bias=True, tie_word_embeddings=True,
    ),
    "jamba-all-experts-last-attention": lambda: jamba_config(
        attn_layer_offset=2, expert_layer_period=1, expert_layer_offset=0, num_experts=4, num_experts_per_tok=4, mamba_d_state=5,
        mamba_d_conv=3, mamba_expand=3,
    ),
    "jamba-no-experts": lambda: jamba_config(num_experts=1, num_experts_per_tok=1, mamba_d_conv=2, mamba_proj_bias=True),
    "jamba-no-attention": lambda: jamba_config(attn_layer_period=8, attn_layer_offset=7, mamba_conv_bias=False),
    "jamba-attention-only": lambda: jamba_config(attn_layer_period=1, attn_layer_offset=0, num_key_value_heads=1),
}  # fmt: skip
MAMBAS: dict[str, Callable[[], MambaConfig]] = {
    "mamba": mamba_config,
    "mamba-bias-untied": lambda: mamba_config(
        use_bias=True, use_conv_bias=False, tie_word_embeddings=False, state_size=5, conv_kernel=2, residual_in_fp32=False
    ),
    "mamba-wide": lambda: mamba_config(expand=3, conv_kernel=3, state_size=5, time_step_rank=7, tie_word_embeddings=False),
}
CONFIGS = JAMBAS | MAMBAS


@torch.no_grad()
def randomise_(model: nn.Module) -> None:
    """Weights of a trained model's size instead of an initialisation's, so that nothing is close to zero or to the identity."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(-3, 1)  # from states that hardly fade to some that last a token
        elif name.endswith("dt_proj.bias"):
            weight.normal_(-1, 0.5)
        elif "norm" in name or name.endswith(".D"):
            weight.normal_(1, 0.2)
        elif "embed" in name or name.endswith(("conv1d.weight", "bias")):
            weight.normal_(0, 0.5)
        else:
            weight.normal_(0, 1.2 * weight.shape[-1] ** -0.5)


def write_checkpoint(folder: Path, config: JambaConfig | MambaConfig, *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write a random model of this config to `folder`; `options` go to `save_pretrained`."""
    torch.manual_seed(5)
    model: PreTrainedModel = JambaForCausalLM(config) if isinstance(config, JambaConfig) else MambaForCausalLM(config)
    randomise_(model)
    model.to(dtype).save_pretrained(folder, **options)  # type: ignore[arg-type]
    return folder


@dataclass
class Peer:
    """The same checkpoint in transformers."""

    model: PreTrainedModel

    @staticmethod
    def load(folder: Path, dtype: torch.dtype = torch.float32) -> Peer:
        return Peer(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())

    @torch.no_grad()
    def logits(self, tokens: list[int], cache: DynamicCache | None = None) -> Tensor:
        """(n, vocab). A cache goes on from where it stands; with one, feed a first prompt or single tokens only."""
        name = "cache_params" if self.model.config.model_type == "mamba" else "past_key_values"
        options = {} if cache is None else {name: cache}
        return self.model(torch.tensor([tokens]), use_cache=cache is not None, **options).logits[0]

    def make_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)


def draw_tokens(n_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (n_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
