"""Implements Lara Mini (Translated 2026): delta mixers, attention over a window or over all tokens, experts.

Attention over a window rotates queries and keys by position; attention over all tokens has no positions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from hybridmem.memory import AttentionSpec
from hybridmem.models.layers.attention import Attention, Rotary, head_dim_of, load_projections
from hybridmem.models.layers.decoder import Block, Decoder, Mixer
from hybridmem.models.layers.delta_mixer import DeltaInputs, DeltaMixer, delta_shape_of
from hybridmem.models.layers.experts import MixtureOfExperts, load_experts, softmax_then_choose
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import LaraMiniConfig


@register("LaraMiniForCausalLM")
class LaraMini(Decoder):
    """Implements Lara Mini: each layer is a delta mixer or attention, and then a mixture of experts."""

    def __init__(self, config: LaraMiniConfig, checkpoint: Checkpoint) -> None:
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(checkpoint, config, "model.embed_tokens.weight")
        rotary = Rotary(config, head_dim_of(config), checkpoint.device)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"model.{name}.weight", n_model), config.rms_norm_eps)

        layers = [
            Block(
                (norm(f"layers.{i}.input_layernorm"), _load_mixer(config, checkpoint, i, rotary)),
                (
                    norm(f"layers.{i}.post_attention_layernorm"),
                    _load_mixture(config, checkpoint, f"model.layers.{i}.mlp"),
                ),
            )
            for i in range(config.num_hidden_layers)
        ]
        super().__init__(config, checkpoint, vocabulary, layers, norm("norm"))


def _load_mixer(config: LaraMiniConfig, checkpoint: Checkpoint, i: int, rotary: Rotary) -> Mixer:
    kind, prefix = config.layer_types[i], f"model.layers.{i}"
    if kind == "linear_attention":
        return _load_delta(config, checkpoint, f"{prefix}.linear_attn", i)
    if kind not in ("full_attention", "sliding_attention"):
        raise UnsupportedModelError(
            f"layer_types[{i}]={kind!r}; implemented are linear_attention, sliding_attention and full_attention"
        )
    prefix, has_bias, is_local = f"{prefix}.self_attn", config.attention_bias, kind == "sliding_attention"
    spec = AttentionSpec(
        config.num_attention_heads, config.num_key_value_heads, head_dim_of(config),
        window=int(config.sliding_window) if is_local else None,
    )  # fmt: skip
    qkv, out = load_projections(
        checkpoint, prefix, config.hidden_size, spec, has_bias=has_bias, has_out_bias=has_bias
    )  # fmt: skip
    q_norm, k_norm = (
        RMSNorm(checkpoint.take(f"{prefix}.{x}_norm.weight", spec.head_dim), config.rms_norm_eps) for x in "qk"
    )
    return Attention(i, spec, qkv, out, rotary=rotary if is_local else None, norms=(q_norm, k_norm))


def _load_delta(config: LaraMiniConfig, checkpoint: Checkpoint, prefix: str, i: int) -> DeltaMixer:
    """Load a delta mixer. Files have one matrix for its projections q, k, v, z, b and a."""
    shape = delta_shape_of(config)
    sizes = [shape.n_channels, shape.n_heads * shape.value_dim, shape.n_heads, shape.n_heads]
    inputs = checkpoint.take(f"{prefix}.in_proj.weight", sum(sizes), config.hidden_size).split_with_sizes(sizes)
    return DeltaMixer(
        checkpoint, prefix, i, shape, DeltaInputs(*inputs), norm_eps=config.rms_norm_eps,
        activation=config.hidden_act, norm="out_norm",
    )  # fmt: skip


def _load_mixture(config: LaraMiniConfig, checkpoint: Checkpoint, prefix: str) -> MixtureOfExperts:
    n_model, n_experts, activation = config.hidden_size, config.num_experts, config.hidden_act
    router = checkpoint.take(f"{prefix}.gate.weight", n_experts, n_model, dtype=torch.float32)
    experts = load_experts(
        checkpoint, f"{prefix}.experts", n_experts, n_model, config.moe_intermediate_size, activation
    )  # fmt: skip
    shared = GatedMLP.load(
        checkpoint, f"{prefix}.shared_expert", n_model, config.shared_expert_intermediate_size, activation
    )  # fmt: skip
    route = partial(softmax_then_choose, renormalise=config.norm_topk_prob)
    return MixtureOfExperts(router, experts, config.num_experts_per_tok, route, shared=shared)
