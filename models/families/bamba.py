"""Implements Bamba (IBM, Princeton & UIUC 2024): Mamba-2, rotary attention at `attn_layer_indices`, gated MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridmem.memory import AttentionSpec
from hybridmem.memory.recurrences import SSDShape
from hybridmem.models.layers.attention import Attention, Rotary, head_dim_of, load_projections
from hybridmem.models.layers.decoder import Block, Decoder, Mixer
from hybridmem.models.layers.mamba_mixers import Mamba2Mixer, Mamba2Options, read_dt_limits
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import BambaConfig, PreTrainedConfig


@register("BambaForCausalLM")
class Bamba(Decoder):
    """Implements Bamba: each layer is a mixer, Mamba-2 or attention, and then a gated MLP."""

    def __init__(self, config: BambaConfig, checkpoint: Checkpoint) -> None:
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(checkpoint, config, "model.embed_tokens.weight")
        rotary = Rotary(config, head_dim_of(config), checkpoint.device, is_partial=True)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"model.{name}.weight", n_model), config.rms_norm_eps)

        layers = []
        for i in range(config.num_hidden_layers):
            prefix = f"model.layers.{i}.feed_forward"
            mlp = GatedMLP.load(
                checkpoint, prefix, n_model, config.intermediate_size, config.hidden_act, has_bias=config.mlp_bias
            )
            layers.append(
                Block(
                    (norm(f"layers.{i}.input_layernorm"), load_mixer(config, checkpoint, i, rotary)),
                    (norm(f"layers.{i}.pre_ff_layernorm"), mlp),
                )
            )
        super().__init__(config, checkpoint, vocabulary, layers, norm("final_layernorm"))


def load_mixer(
    config: PreTrainedConfig, checkpoint: Checkpoint, i: int, rotary: Rotary | None, scale: float | None = None
) -> Mixer:
    """Load the attention or the Mamba-2 mixer of layer i, from the tensor names of Bamba and its relatives."""
    if config.layers_block_type[i] == "full_attention":
        return load_attention(config, checkpoint, i, rotary, scale)
    return Mamba2Mixer(checkpoint, f"model.layers.{i}.mamba", i, mamba2_options(config))


def load_attention(
    config: PreTrainedConfig, checkpoint: Checkpoint, i: int, rotary: Rotary | None, scale: float | None = None
) -> Attention:
    """Load the attention of layer i, from the tensor names of Bamba and its relatives."""
    spec = AttentionSpec(config.num_attention_heads, config.num_key_value_heads, head_dim_of(config))
    bias = config.attention_bias
    projections = load_projections(
        checkpoint, f"model.layers.{i}.self_attn", config.hidden_size, spec, has_bias=bias, has_out_bias=bias
    )
    return Attention(i, spec, *projections, rotary=rotary, scale=scale)


def mamba2_options(config: PreTrainedConfig) -> Mamba2Options:
    """Read the sizes and options of a Mamba-2 mixer from a config of Bamba or its relatives."""
    shape = SSDShape(
        config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state, config.mamba_d_conv
    )
    return Mamba2Options(
        n_model=config.hidden_size,
        shape=shape,
        has_conv_bias=config.mamba_conv_bias,
        has_in_bias=config.mamba_proj_bias,
        has_out_bias=config.mamba_proj_bias,
        norm_eps=config.rms_norm_eps,
        n_norm_groups=config.mamba_n_groups,
        dt_limits=read_dt_limits(config),
        activation=config.hidden_act,
    )
