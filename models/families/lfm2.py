"""Implements LFM2 (Liquid AI 2025): gated short convolutions, some rotary attention layers, gated MLPs or experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec
from hybridmem.models.layers.attention import Attention, Rotary, head_dim_of, load_projections
from hybridmem.models.layers.decoder import Block, Decoder, Mixer
from hybridmem.models.layers.experts import MixtureOfExperts, load_experts, sigmoid_then_choose
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.short_conv_mixer import ShortConvMixer
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.vision.pictures import pictures_below, text_config_of
from hybridmem.models.vision.tiles import TileSight
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import Lfm2Config, Lfm2MoeConfig, Lfm2VlConfig

_MLP_NAMES = ("w1", "w3", "w2")


@register("Lfm2ForCausalLM")
class Lfm2(Decoder):
    """Implements LFM2: each layer is a short convolution or attention, and then a gated MLP."""

    def __init__(self, config: Lfm2Config, checkpoint: Checkpoint, root: str = "model") -> None:
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(checkpoint, config, f"{root}.embed_tokens.weight")
        rotary = Rotary(config, head_dim_of(config), checkpoint.device)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"{root}.{name}.weight", n_model), config.norm_eps)

        layers = [
            Block(
                (norm(f"layers.{i}.operator_norm"), _mixer(config, checkpoint, f"{root}.layers.{i}", i, rotary)),
                (
                    norm(f"layers.{i}.ffn_norm"),
                    self._feed_forward(config, checkpoint, f"{root}.layers.{i}", i),
                ),
            )
            for i in range(config.num_hidden_layers)
        ]
        super().__init__(config, checkpoint, vocabulary, layers, norm("embedding_norm"))

    def _feed_forward(
        self, config: Lfm2Config, checkpoint: Checkpoint, prefix: str, i: int
    ) -> Callable[[Tensor], Tensor]:
        return _load_mlp(checkpoint, f"{prefix}.feed_forward", config.hidden_size, _mlp_size(config))


@register("Lfm2VlForConditionalGeneration")
class Lfm2Vl(Lfm2):
    """Implements LFM2-VL: LFM2 with a tower, which is loaded at the first picture."""

    def __init__(self, config: Lfm2VlConfig, checkpoint: Checkpoint) -> None:
        super().__init__(text_config_of(config), checkpoint, "model.language_model")
        self.see(pictures_below(TileSight(config), config, checkpoint))


@register("Lfm2MoeForCausalLM")
class Lfm2Moe(Lfm2):
    """Implements LFM2 with experts in all layers except the first `num_dense_layers`."""

    def _feed_forward(
        self, config: Lfm2MoeConfig, checkpoint: Checkpoint, prefix: str, i: int
    ) -> Callable[[Tensor], Tensor]:
        n_model, n_experts, prefix = config.hidden_size, config.num_experts, f"{prefix}.feed_forward"
        if i < config.num_dense_layers:
            return _load_mlp(checkpoint, prefix, n_model, config.intermediate_size)
        bias_E = (
            checkpoint.take(f"{prefix}.expert_bias", n_experts, dtype=torch.float32) if config.use_expert_bias else None
        )
        route = partial(
            sigmoid_then_choose,
            bias_E=bias_E,
            renormalise=config.norm_topk_prob,
            eps=1e-6,
            scale=config.routed_scaling_factor,
        )
        n_inner = config.moe_intermediate_size
        experts = load_experts(checkpoint, f"{prefix}.experts", n_experts, n_model, n_inner, "silu", names=_MLP_NAMES)
        return MixtureOfExperts(
            checkpoint.take(f"{prefix}.gate.weight", n_experts, n_model), experts, config.num_experts_per_tok, route
        )


def _mixer(config: Lfm2Config | Lfm2MoeConfig, checkpoint: Checkpoint, prefix: str, i: int, rotary: Rotary) -> Mixer:
    n_model, kind = config.hidden_size, config.layer_types[i]
    if kind == "conv":
        return ShortConvMixer(checkpoint, f"{prefix}.conv", i, n_model, config.conv_L_cache, has_bias=config.conv_bias)
    if kind != "full_attention":
        raise UnsupportedModelError(f"layer_types[{i}]={kind!r}; implemented are conv and full_attention")
    prefix = f"{prefix}.self_attn"
    spec = AttentionSpec(config.num_attention_heads, config.num_key_value_heads, head_dim_of(config))
    qkv, out = load_projections(checkpoint, prefix, n_model, spec, out="out_proj")
    q_norm, k_norm = (
        RMSNorm(checkpoint.take(f"{prefix}.{x}_layernorm.weight", spec.head_dim), config.norm_eps) for x in "qk"
    )
    return Attention(i, spec, qkv, out, rotary=rotary, norms=(q_norm, k_norm))


def _load_mlp(checkpoint: Checkpoint, prefix: str, n_model: int, n_inner: int) -> GatedMLP:
    return GatedMLP.load(checkpoint, prefix, n_model, n_inner, "silu", names=_MLP_NAMES)


def _mlp_size(config: Lfm2Config) -> int:
    """Return the inner size of an MLP: two thirds of the config's size, times a factor, rounded up to a multiple.

    If the config says not to adjust the size, it is the config's size.
    """
    size = config.intermediate_size
    if not config.block_auto_adjust_ff_dim:
        return int(size)
    size = int(config.block_ffn_dim_multiplier * int(2 * size / 3))
    multiple = config.block_multiple_of
    return int(multiple * ((size + multiple - 1) // multiple))
