"""Implements LFM3 (Liquid AI 2026): gated short convolutions, attention over all tokens or a window, gated MLPs.

The output of each part is normed before it is added to the residual stream. That of attention also has a gate for each
head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridmem.memory import AttentionSpec
from hybridmem.models.layers.attention import Attention, Rotary, head_dim_of, load_projections
from hybridmem.models.layers.decoder import Block, Decoder, Mixer, Normed, in_turn
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.short_conv_mixer import ShortConvMixer
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.vision.grid import FlatGridSight
from hybridmem.models.vision.pictures import pictures_below, text_config_of
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import Lfm3Config, Lfm3VlConfig

_ATTENTION = ("full_attention", "sliding_attention")


@register("Lfm3ForCausalLM")
class Lfm3(Decoder):
    """Implements LFM3: each layer is a short convolution or attention, and then a gated MLP."""

    def __init__(self, config: Lfm3Config, checkpoint: Checkpoint, root: str = "model") -> None:
        n_model, n_inner = config.hidden_size, config.intermediate_size
        vocabulary = Vocabulary.load(checkpoint, config, f"{root}.embed_tokens.weight")
        rotaries = {
            kind: Rotary(config, head_dim_of(config), checkpoint.device, layer_type=kind)
            for kind in _ATTENTION
            if kind in config.layer_types
        }

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"{root}.{name}.weight", n_model), config.norm_eps)

        layers = []
        for i in range(config.num_hidden_layers):
            prefix = f"layers.{i}"
            mixer = _load_mixer(config, checkpoint, f"{root}.{prefix}", i, rotaries)
            mlp = GatedMLP.load(
                checkpoint, f"{root}.{prefix}.feed_forward", n_model, n_inner, "silu", names=("w1", "w3", "w2")
            )
            norms = norm(f"{prefix}.operator_norm"), norm(f"{prefix}.ffn_norm")
            if config.use_sandwich_norm:
                last = norm(f"{prefix}.post_operator_norm"), norm(f"{prefix}.post_ffn_norm")
                layers.append(Block((norms[0], Normed(mixer, last[0])), (norms[1], in_turn(mlp, last[1]))))
            else:
                layers.append(Block((norms[0], mixer), (norms[1], mlp)))
        super().__init__(config, checkpoint, vocabulary, layers, norm("embedding_norm"))


@register("Lfm3VlForConditionalGeneration")
class Lfm3Vl(Lfm3):
    """Implements LFM3-VL: LFM3 with a vision tower, which is loaded at the first picture."""

    def __init__(self, config: Lfm3VlConfig, checkpoint: Checkpoint) -> None:
        super().__init__(text_config_of(config), checkpoint, "model.language_model")
        self.see(pictures_below(FlatGridSight(config), config, checkpoint))


def _load_mixer(config: Lfm3Config, checkpoint: Checkpoint, prefix: str, i: int, rotaries: dict[str, Rotary]) -> Mixer:
    n_model, kind, eps = config.hidden_size, config.layer_types[i], config.norm_eps
    if kind == "conv":
        return ShortConvMixer(checkpoint, f"{prefix}.conv", i, n_model, config.conv_L_cache, has_bias=config.conv_bias)
    if kind not in _ATTENTION:
        raise UnsupportedModelError(f"layer_types[{i}]={kind!r}; implemented are conv, {' and '.join(_ATTENTION)}")
    prefix, has_bias = f"{prefix}.self_attn", config.attention_bias
    window = config.sliding_window if kind == "sliding_attention" else None
    spec = AttentionSpec(
        config.num_attention_heads, config.num_key_value_heads, head_dim_of(config),
        window=None if window is None else int(window),
    )  # fmt: skip
    qkv, out = load_projections(checkpoint, prefix, n_model, spec, has_bias=has_bias, has_out_bias=has_bias)
    q_norm, k_norm = (RMSNorm(checkpoint.take(f"{prefix}.{x}_norm.weight", spec.head_dim), eps) for x in "qk")
    gate = None
    if config.use_attention_gate:
        name = checkpoint.name_of(f"{prefix}.gate_proj.weight", f"{prefix}.g_proj.weight")
        gate = Linear(checkpoint.take(name, spec.n_query_heads, n_model), activation="sigmoid")
    return Attention(i, spec, qkv, out, rotary=rotaries[kind], norms=(q_norm, k_norm), gate=gate)
