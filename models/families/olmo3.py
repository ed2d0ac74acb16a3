"""Implements OLMo 3 (Ai2 2025): each layer is attention and a gated MLP, whose outputs are normed.

A layer computes x + norm(attention(x)), then x + norm(mlp(x)). Some layers attend to a window and some to all tokens,
each type with a rotary embedding of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from hybridmem.memory import AttentionSpec, Step
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.families.llama import window_of
from hybridmem.models.layers.attention import Attention, Rotary, head_dim_of, load_projections
from hybridmem.models.layers.decoder import Decoder, Mixer, Normed
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm, RowNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import Olmo3Config, OlmoHybridConfig


@register("Olmo3ForCausalLM")
class Olmo3(Decoder):
    """Implements OLMo 3."""

    def __init__(self, config: Olmo3Config, checkpoint: Checkpoint) -> None:
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(checkpoint, config, "model.embed_tokens.weight")
        windows = [window_of(config, i) for i in range(config.num_hidden_layers)]
        rotaries = {
            kind: Rotary(config, head_dim_of(config), checkpoint.device, layer_type=kind)
            for kind in set(config.layer_types)
        }

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"{name}.weight", n_model), config.rms_norm_eps)

        layers = []
        for i, window in enumerate(windows):
            prefix = f"model.layers.{i}"
            rotary = rotaries[config.layer_types[i]]
            attention = load_attention(config, checkpoint, f"{prefix}.self_attn", i, rotary, window=window)
            mlp = GatedMLP.load(checkpoint, f"{prefix}.mlp", n_model, config.intermediate_size, config.hidden_act)
            normed = Normed(attention, norm(f"{prefix}.post_attention_layernorm"))
            layers.append(AttentionLayer(normed, mlp, norm(f"{prefix}.post_feedforward_layernorm")))
        super().__init__(config, checkpoint, vocabulary, layers, norm("model.norm"))


@dataclass(frozen=True)
class AttentionLayer:
    """Computes x + mixer(x), then x + norm(mlp(x)). The mixer norms its own output."""

    mixer: Mixer
    mlp: GatedMLP
    norm: RMSNorm

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return self.mixer.specs

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        dtype = self.norm.weight_M.dtype  # The residual stream may have more bits than the layer's rows.
        x_TM = x_TM + self.mixer(x_TM.to(dtype), step)
        return x_TM + self.norm(self.mlp(x_TM.to(dtype)))


def load_attention(
    config: Olmo3Config | OlmoHybridConfig,
    checkpoint: Checkpoint,
    prefix: str,
    i: int,
    rotary: Rotary | None,
    *,
    window: int | None = None,
) -> Attention:
    """Load attention that norms queries and keys over all heads of a token together."""
    spec = AttentionSpec(config.num_attention_heads, config.num_key_value_heads, head_dim_of(config), window=window)
    has_bias = config.attention_bias
    qkv, out = load_projections(
        checkpoint, prefix, config.hidden_size, spec, has_bias=has_bias, has_out_bias=has_bias
    )  # fmt: skip
    q_norm, k_norm = (
        RowNorm(RMSNorm(checkpoint.take(f"{prefix}.{x}_norm.weight", n * spec.head_dim), config.rms_norm_eps))
        for x, n in (("q", spec.n_query_heads), ("k", spec.n_kv_heads))
    )
    return Attention(i, spec, qkv, out, rotary=rotary, norms=(q_norm, k_norm))
