"""Implements gpt-oss (OpenAI 2025): attention over a window and over all tokens in turn, with sinks, and experts.

The sink of a head takes part in the softmax of its scores, but has no value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec
from hybridmem.memory.kernels import steady
from hybridmem.models.families.llama import window_of
from hybridmem.models.layers.attention import Attention, Rotary, head_dim_of, load_projections
from hybridmem.models.layers.decoder import Block, Decoder
from hybridmem.models.layers.experts import MixtureOfExperts, Route, choose_then_softmax
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, check_numbers, require
from hybridmem.models.weights.dry import joined

if TYPE_CHECKING:
    from transformers import GptOssConfig


@register("GptOssForCausalLM")
class GptOss(Decoder):
    """Implements gpt-oss: each layer is attention with sinks, and then a mixture of experts."""

    def __init__(self, config: GptOssConfig, checkpoint: Checkpoint) -> None:
        require(config, hidden_act="silu")
        check_numbers(config, "swiglu_limit", above=0)
        check_numbers(config, "swiglu_alpha")
        vocabulary = Vocabulary.load(checkpoint, config, "model.embed_tokens.weight")
        rotary = Rotary(config, head_dim_of(config), checkpoint.device)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"model.{name}.weight", config.hidden_size), config.rms_norm_eps)

        layers = [
            Block(
                (norm(f"layers.{i}.input_layernorm"), _load_attention(config, checkpoint, i, rotary)),
                (
                    norm(f"layers.{i}.post_attention_layernorm"),
                    _load_mixture(config, checkpoint, f"model.layers.{i}.mlp"),
                ),
            )
            for i in range(config.num_hidden_layers)
        ]
        super().__init__(config, checkpoint, vocabulary, layers, norm("norm"))


@dataclass(frozen=True)
class Expert:
    """Computes W_down((u + 1) g sigmoid(alpha g)), with g = min(W_gate x, limit) and u = clamp(W_up x, limit).

    Attributes:
        gate_up: a single product for g and u, in this order.
    """

    gate_up: Linear
    down: Linear
    alpha: float
    limit: float
    _sigmoid: Callable[[Tensor], Tensor] = field(default_factory=lambda: steady(torch.sigmoid))

    def __call__(self, x_TM: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate_up(x_TM).chunk(2, -1)
        gate_TF, up_TF = gate_TF.clamp(max=self.limit), up_TF.clamp(-self.limit, self.limit)
        return self.down((up_TF + 1) * gate_TF * self._sigmoid(self.alpha * gate_TF))


def _load_attention(config: GptOssConfig, checkpoint: Checkpoint, i: int, rotary: Rotary) -> Attention:
    prefix, has_bias = f"model.layers.{i}.self_attn", config.attention_bias
    spec = AttentionSpec(
        config.num_attention_heads, config.num_key_value_heads, head_dim_of(config), window=window_of(config, i)
    )
    projections = load_projections(
        checkpoint, prefix, config.hidden_size, spec, has_bias=has_bias, has_out_bias=has_bias
    )
    sinks = checkpoint.take(f"{prefix}.sinks", spec.n_query_heads, dtype=torch.float32)
    return Attention(i, spec, *projections, rotary=rotary, sinks=sinks)


def _load_mixture(config: GptOssConfig, checkpoint: Checkpoint, prefix: str) -> MixtureOfExperts:
    n_model, n_inner, n_experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    gate_up = _take_rows(checkpoint, f"{prefix}.experts.gate_up_proj", n_experts, 2 * n_inner, n_model)
    gate_up_bias = checkpoint.take(f"{prefix}.experts.gate_up_proj_bias", n_experts, 2 * n_inner)
    down = _take_rows(checkpoint, f"{prefix}.experts.down_proj", n_experts, n_model, n_inner)
    down_bias = checkpoint.take(f"{prefix}.experts.down_proj_bias", n_experts, n_model)
    experts = [
        # Rows of the gate and of what it multiplies alternate.
        Expert(
            Linear(rows[0::2], rows[1::2], bias=joined(bias[0::2], bias[1::2])), Linear(own, bias=own_bias),
            config.swiglu_alpha, config.swiglu_limit,
        )
        for rows, bias, own, own_bias in zip(gate_up, gate_up_bias, down, down_bias, strict=True)
    ]  # fmt: skip
    router = checkpoint.take(f"{prefix}.router.weight", n_experts, n_model)
    bias_E = checkpoint.take(f"{prefix}.router.bias", n_experts, dtype=torch.float32)

    def route(n_chosen: int) -> Route:
        choose = choose_then_softmax(n_chosen)
        return lambda logits: choose(logits + bias_E)

    return MixtureOfExperts(router, experts, config.num_experts_per_tok, route)


def _take_rows(checkpoint: Checkpoint, name: str, n_experts: int, n_out: int, n_in: int) -> Tensor:
    """Return weights (experts, outputs, inputs), which are stored with inputs before outputs."""
    return checkpoint.take(name, n_experts, n_in, n_out).transpose(1, 2).contiguous()
