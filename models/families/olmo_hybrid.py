"""Implements OLMo Hybrid (Ai2 2026): each layer is a delta mixer, or in every few layers attention, and a gated MLP.

Delta layers norm the input of mixer and MLP. Attention layers norm the outputs: x + norm(attention(x)), then x +
norm(mlp(x)).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridmem.models.families.olmo3 import AttentionLayer, load_attention
from hybridmem.models.layers.attention import Rotary, head_dim_of
from hybridmem.models.layers.decoder import Block, Decoder, Layer, Normed
from hybridmem.models.layers.delta_mixer import DeltaInputs, DeltaMixer, delta_shape_of
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError
from hybridmem.models.weights.dry import joined

if TYPE_CHECKING:
    from transformers import OlmoHybridConfig

_DELTA_NORM_EPS = 1e-5
"""Epsilon of the norms after the delta rule, whatever the config's."""
_NAMES = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}
"""Transformers' names of norms -> those that files have instead."""


@register("OlmoHybridForCausalLM")
class OlmoHybrid(Decoder):
    """Implements OLMo Hybrid."""

    def __init__(self, config: OlmoHybridConfig, checkpoint: Checkpoint) -> None:
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(checkpoint, config, "model.embed_tokens.weight")
        rotary = _load_rotary(config, checkpoint)

        def norm(prefix: str, name: str) -> RMSNorm:
            stored = checkpoint.name_of(*(f"{prefix}.{known}.weight" for known in (name, _NAMES.get(name, name))))
            return RMSNorm(checkpoint.take(stored, n_model), config.rms_norm_eps)

        layers: list[Layer] = []
        for i in range(config.num_hidden_layers):
            prefix, kind = f"model.layers.{i}", config.layer_types[i]
            mlp = GatedMLP.load(checkpoint, f"{prefix}.mlp", n_model, config.intermediate_size, config.hidden_act)
            if kind == "linear_attention":
                mixer = _load_delta(config, checkpoint, f"{prefix}.linear_attn", i)
                norms = norm(prefix, "input_layernorm"), norm(prefix, "post_attention_layernorm")
                layers.append(Block((norms[0], mixer), (norms[1], mlp)))
            elif kind == "full_attention":
                attention = load_attention(config, checkpoint, f"{prefix}.self_attn", i, rotary)
                normed = Normed(attention, norm(prefix, "post_attention_layernorm"))
                layers.append(AttentionLayer(normed, mlp, norm(prefix, "post_feedforward_layernorm")))
            else:
                raise UnsupportedModelError(
                    f"layer_types[{i}]={kind!r}; implemented are linear_attention and full_attention"
                )
        super().__init__(config, checkpoint, vocabulary, layers, norm("model", "norm"))


def _load_rotary(config: OlmoHybridConfig, checkpoint: Checkpoint) -> Rotary | None:
    """Return the rotation of queries and keys; None if the config names no base, as in the published models."""
    parameters = config.rope_parameters
    if parameters is None or parameters.get("rope_theta") is None:
        return None
    return Rotary(config, head_dim_of(config), checkpoint.device)


def _load_delta(config: OlmoHybridConfig, checkpoint: Checkpoint, prefix: str, i: int) -> DeltaMixer:
    shape = delta_shape_of(config)
    n_values = shape.n_heads * shape.value_dim
    sizes = {"q": shape.n_keys, "k": shape.n_keys, "v": n_values, "g": n_values, "b": shape.n_heads, "a": shape.n_heads}
    q, k, v, *others = (
        checkpoint.take(f"{prefix}.{name}_proj.weight", size, config.hidden_size) for name, size in sizes.items()
    )
    return DeltaMixer(
        checkpoint, prefix, i, shape, DeltaInputs(joined(q, k, v), *others),
        norm_eps=_DELTA_NORM_EPS, activation=config.hidden_act,
        most_beta=2.0 if config.linear_allow_neg_eigval else 1.0, norm="o_norm", out="o_proj",
        conv_parts=tuple(f"{prefix}.{name}_conv1d" for name in "qkv"),
    )  # fmt: skip
