"""Implements GLM-5.3 (Z.ai 2026): delta attention, latent attention to chosen spans of rows, and experts.

Residual streams run beside each other (mHC). No layer rotates keys: only delta attention encodes positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridmem.memory.kernels import RowProduct
from hybridmem.models.families.bailing_hybrid import bounded_decay
from hybridmem.models.families.kimi_linear import KimiDeltaMixer, check_heads, read_delta_shape, repeat_rates
from hybridmem.models.layers.decoder import Decoder, Function, Mixer, in_turn
from hybridmem.models.layers.experts import MixtureOfExperts, check_groups, load_experts, sigmoid_then_choose
from hybridmem.models.layers.hyper_connection import RoutedStreams, StreamBlock
from hybridmem.models.layers.indexer import IndexedLatentAttention
from hybridmem.models.layers.latent_attention import load_latent_attention
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mlp import ClampedMLP, GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.span_indexer import PoolIndexer
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.vision.grid import PlainGridSight
from hybridmem.models.vision.pictures import pictures_below, text_config_of
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError, check_numbers, require

if TYPE_CHECKING:
    from transformers import Glm5NextConfig

_EXPERTS_ACTIVATION = "silu"
"""The activation of experts, whatever the config says, as in transformers."""


@register("Glm5NextForConditionalGeneration")
class Glm5Next(Decoder):
    """Implements GLM-5.3. Its tower is loaded at the first picture; layers for multi-token prediction never are."""

    def __init__(self, config: Glm5NextConfig, checkpoint: Checkpoint) -> None:
        text = text_config_of(config)
        # Otherwise the first queries would read no row at all.
        require(text, index_kpool_always_select_tail=True)
        check_numbers(text, "swiglu_limit")
        check_heads(text)
        root = "model.language_model"
        root = root if f"{root}.embed_tokens.weight" in checkpoint else "model"
        vocabulary = Vocabulary.load(checkpoint, text, f"{root}.embed_tokens.weight")
        n_streams, n_model = text.hc_mult, text.hidden_size

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"{root}.{name}.weight", n_model), text.rms_norm_eps)

        def streams(i: int, part: str, norm_name: str) -> RoutedStreams:
            n_computed, prefix = (2 + n_streams) * n_streams, f"{root}.layers.{i}.hc_{part}"
            take = partial(checkpoint.take, dtype=torch.float32)
            return RoutedStreams(
                n_streams,
                RowProduct(take(f"{prefix}_fn", n_computed, n_streams * n_model)),
                take(f"{prefix}_base", n_computed),
                take(f"{prefix}_scale", 3),
                text.hc_eps,
                text.hc_sinkhorn_iters,
                text.rms_norm_eps,
                norm(f"layers.{i}.{norm_name}"),
            )

        layers = []
        for i in range(text.num_hidden_layers):
            prefix = f"{root}.layers.{i}"
            mixer = self._mixer(text, checkpoint, f"{prefix}.self_attn", i)
            feed_forward = self._feed_forward(text, checkpoint, f"{prefix}.mlp", text.mlp_layer_types[i])
            layers.append(
                StreamBlock(
                    None,
                    (streams(i, "attn", "input_layernorm"), mixer),
                    (streams(i, "ffn", "post_attention_layernorm"), feed_forward),
                    n_copies=1 if i else n_streams,
                )
            )
        super().__init__(text, checkpoint, vocabulary, layers, in_turn(_mean_of(n_streams), norm("norm")))
        n_layers = text.num_hidden_layers  # A layer for multi-token prediction follows the last one.
        self.draft_prefixes = (f"{root}.layers.{n_layers}.",)
        if hasattr(config, "vision_config"):  # A config for text alone has no ids of the tokens around pictures.
            self.see(pictures_below(PlainGridSight(config), config, checkpoint))

    def _mixer(self, config: Any, checkpoint: Checkpoint, prefix: str, i: int) -> Mixer:
        kind = config.layer_types[i]
        if kind == "linear_attention":
            return self._delta_mixer(config, checkpoint, prefix, i)
        if kind != "indexed_attention":
            raise UnsupportedModelError(
                f"layer_types[{i}]={kind!r}; implemented are linear_attention and indexed_attention"
            )
        attention = load_latent_attention(
            config, checkpoint, prefix, i, None, is_interleaved=False, norm_eps=config.rms_norm_eps
        )
        spec = replace(attention.spec, n_chosen=config.index_topk, span_tokens=config.index_kpool)
        indexer = PoolIndexer(config, checkpoint, f"{prefix}.indexer", i) if _has_index(config, i) else None
        return IndexedLatentAttention(replace(attention, spec=spec), indexer)

    def _delta_mixer(self, config: Any, checkpoint: Checkpoint, prefix: str, i: int) -> Mixer:
        shape, n_model, take = read_delta_shape(config), config.hidden_size, checkpoint.take

        def in_two_steps(name: str, activation: str | None) -> Function:
            down = Linear(take(f"{prefix}.{name}_a_proj.weight", shape.key_dim, n_model))
            up = take(f"{prefix}.{name}_b_proj.weight", shape.n_keys, shape.key_dim)
            return in_turn(down, Linear(up, activation=activation))

        rates = repeat_rates(take(f"{prefix}.A_log", shape.n_heads, dtype=torch.float32), shape)
        bias = take(f"{prefix}.dt_bias", shape.n_keys, dtype=torch.float32)
        decay, gate = in_two_steps("f", None), in_two_steps("g", "sigmoid")
        decays: tuple[Tensor, Tensor] | None = bias, rates
        if config.linear_lower_bound is not None:
            check_numbers(config, "linear_lower_bound")
            decay, decays = bounded_decay(decay, bias, rates, config.linear_lower_bound), None
        return KimiDeltaMixer(config, checkpoint, prefix, i, shape, decay, gate, decays)

    def _feed_forward(self, config: Any, checkpoint: Checkpoint, prefix: str, kind: str) -> Function:
        n_model, n_experts, n_inner = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size

        def load_mlp(name: str, size: int) -> ClampedMLP:
            mlp = GatedMLP.load(checkpoint, name, n_model, size, None)
            return ClampedMLP.of(mlp, config.hidden_act, config.swiglu_limit)

        if kind == "dense":
            return load_mlp(prefix, config.intermediate_size)
        if kind != "sparse":
            raise UnsupportedModelError(f"mlp_layer_types has {kind!r}; implemented are dense and sparse")
        if config.n_shared_experts < 1:
            raise UnsupportedModelError(f"n_shared_experts={config.n_shared_experts}; implemented is at least one")
        check_groups(config, least=2)
        # The router is float32 whatever the model's dtype, because scores decide which experts run, and close scores
        # are common.
        router = checkpoint.take(f"{prefix}.gate.weight", n_experts, n_model, dtype=torch.float32)
        route = partial(
            sigmoid_then_choose,
            bias_E=checkpoint.take(f"{prefix}.gate.e_score_correction_bias", n_experts, dtype=torch.float32),
            n_groups=config.n_group,
            n_chosen_groups=config.topk_group,
            renormalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )
        experts = [
            ClampedMLP.of(expert, _EXPERTS_ACTIVATION, config.swiglu_limit)
            for expert in load_experts(checkpoint, f"{prefix}.experts", n_experts, n_model, n_inner, None)
        ]
        shared = load_mlp(f"{prefix}.shared_experts", n_inner * config.n_shared_experts)
        return MixtureOfExperts(router, experts, config.num_experts_per_tok, route, shared=shared)


def _has_index(config: Any, i: int) -> bool:
    """True if a layer has an index of its own. Others read the rows that the layer before has chosen."""
    kind = config.indexer_types[i]
    if kind not in ("full", "shared"):
        raise UnsupportedModelError(f"indexer_types[{i}]={kind!r}; implemented are full and shared")
    # In transformers, too, only the next layer can read the rows that a layer has chosen.
    may_share = i > 0 and config.layer_types[i - 1] == "indexed_attention" and config.indexer_types[i - 1] == "full"
    if kind == "shared" and not may_share:
        raise UnsupportedModelError(
            f"indexer_types[{i}]='shared'; the layer before it has no index of its own, so this one must be 'full'"
        )
    return bool(kind == "full")


def _mean_of(n_streams: int) -> Callable[[Tensor], Tensor]:
    """Return the function that computes the mean of the streams, (T, M)."""
    return lambda x_TE: x_TE.view(len(x_TE), n_streams, -1).mean(1)
