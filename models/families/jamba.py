"""Implements Jamba (Lieber et al. 2024): Mamba layers, some layers of attention, and experts in some layers.

Every `attn_layer_period`-th layer is attention, every `expert_layer_period`-th has experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from hybridmem.memory import AttentionSpec
from hybridmem.models.layers.attention import Attention, head_dim_of, load_projections
from hybridmem.models.layers.decoder import Block, Decoder, Mixer
from hybridmem.models.layers.experts import MixtureOfExperts, softmax_then_choose
from hybridmem.models.layers.mamba_mixers import MambaMixer, MambaShape
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import JambaConfig


@register("JambaForCausalLM")
class Jamba(Decoder):
    """Implements Jamba: each layer is a mixer, Mamba or attention, and then a gated MLP or a mixture of experts."""

    def __init__(self, config: JambaConfig, checkpoint: Checkpoint) -> None:
        vocabulary = Vocabulary.load(checkpoint, config, "model.embed_tokens.weight")

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"model.{name}.weight", config.hidden_size), config.rms_norm_eps)

        layers = []
        for i in range(config.num_hidden_layers):
            feed_forward = _feed_forward(
                config, checkpoint, f"model.layers.{i}.feed_forward", config.layers_num_experts[i]
            )
            layers.append(
                Block(
                    (norm(f"layers.{i}.input_layernorm"), _mixer(config, checkpoint, i)),
                    (norm(f"layers.{i}.pre_ff_layernorm"), feed_forward),
                )
            )
        super().__init__(config, checkpoint, vocabulary, layers, norm("final_layernorm"))


def _mixer(config: JambaConfig, checkpoint: Checkpoint, i: int) -> Mixer:
    prefix = f"model.layers.{i}"
    if config.layers_block_type[i] == "attention":
        spec = AttentionSpec(config.num_attention_heads, config.num_key_value_heads, head_dim_of(config))
        return Attention(i, spec, *load_projections(checkpoint, f"{prefix}.self_attn", config.hidden_size, spec))
    shape = MambaShape(
        n_model=config.hidden_size, n_channels=config.mamba_expand * config.hidden_size, d_state=config.mamba_d_state,
        d_conv=config.mamba_d_conv, dt_rank=int(config.mamba_dt_rank), has_conv_bias=config.mamba_conv_bias,
        has_proj_bias=config.mamba_proj_bias, norm_eps=config.rms_norm_eps, activation=config.hidden_act,
    )  # fmt: skip
    return MambaMixer(checkpoint, f"{prefix}.mamba", i, shape)


def _feed_forward(
    config: JambaConfig, checkpoint: Checkpoint, prefix: str, n_experts: int
) -> Callable[[Tensor], Tensor]:
    def load(name: str) -> GatedMLP:
        return GatedMLP.load(checkpoint, name, config.hidden_size, config.intermediate_size, config.hidden_act)

    if n_experts <= 1:
        return load(prefix)
    router = checkpoint.take(f"{prefix}.router.weight", n_experts, config.hidden_size)
    experts = [load(f"{prefix}.experts.{i}") for i in range(n_experts)]
    return MixtureOfExperts(router, experts, config.num_experts_per_tok, softmax_then_choose)
