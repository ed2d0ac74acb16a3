"""Implements Falcon-H1 (TII 2025): attention and Mamba-2 in parallel in every layer, then a gated MLP.

Its parts are scaled by muP's multipliers. All multipliers except those of embeddings and logits scale the input or
output of a projection, so they are multiplied into the projection's weights when these are loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory.recurrences import SSDShape
from hybridmem.models.families.bamba import load_attention, mamba2_options
from hybridmem.models.layers.attention import Rotary, head_dim_of
from hybridmem.models.layers.decoder import Block, Decoder, Parallel
from hybridmem.models.layers.mamba_mixers import Mamba2Mixer, Mamba2Options
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, check_numbers

if TYPE_CHECKING:
    from transformers import FalconH1Config

_MULTIPLIERS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")


@register("FalconH1ForCausalLM")
class FalconH1(Decoder):
    """Implements Falcon-H1: the outputs of attention and Mamba-2 are added, and a gated MLP follows."""

    def __init__(self, config: FalconH1Config, checkpoint: Checkpoint) -> None:
        check_numbers(config, *(f"{name}_multiplier" for name in _MULTIPLIERS))
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(
            checkpoint,
            config,
            "model.embed_tokens.weight",
            embedding_scale=config.embedding_multiplier,
            logits_scale=config.lm_head_multiplier,
        )
        rotary, options = Rotary(config, head_dim_of(config), checkpoint.device), _mamba2_options(config)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"model.{name}.weight", n_model), config.rms_norm_eps)

        layers = []
        for i in range(config.num_hidden_layers):
            prefix = f"model.layers.{i}"
            _scale_weights(config, checkpoint, prefix, options.shape)
            mixers = (
                Mamba2Mixer(checkpoint, f"{prefix}.mamba", i, options),
                load_attention(config, checkpoint, i, rotary),
            )
            mlp = GatedMLP.load(
                checkpoint,
                f"{prefix}.feed_forward",
                n_model,
                config.intermediate_size,
                config.hidden_act,
                has_bias=config.mlp_bias,
            )
            layers.append(
                Block(
                    (norm(f"layers.{i}.input_layernorm"), Parallel(mixers)), (norm(f"layers.{i}.pre_ff_layernorm"), mlp)
                )
            )
        super().__init__(config, checkpoint, vocabulary, layers, norm("final_layernorm"))


def _mamba2_options(config: FalconH1Config) -> Mamba2Options:
    return replace(
        mamba2_options(config),
        has_out_bias=config.projectors_bias,
        norm_eps=config.rms_norm_eps if config.mamba_rms_norm else None,
        norms_before_gate=config.mamba_norm_before_gate,
    )


def _scale_weights(config: FalconH1Config, checkpoint: Checkpoint, prefix: str, shape: SSDShape) -> None:
    """Set the multipliers of a layer's projections. The checkpoint then scales the projections' weights by them."""

    def scale(name: str, of_input: float = 1.0, of_output: float | Tensor = 1.0) -> None:
        checkpoint.scale(f"{prefix}.{name}.weight", of_input * of_output)
        checkpoint.scale(f"{prefix}.{name}.bias", of_output)

    n_keys = shape.n_groups * shape.d_state
    sizes = torch.tensor([shape.n_inner, shape.n_inner, n_keys, n_keys, shape.n_heads])
    of_rows = torch.tensor(config.ssm_multipliers[:5], dtype=torch.float32).repeat_interleave(sizes)
    of_gate, of_down = config.mlp_multipliers[:2]
    scale("mamba.in_proj", config.ssm_in_multiplier, of_rows)
    scale("mamba.out_proj", of_output=config.ssm_out_multiplier)
    scale("self_attn.q_proj", config.attention_in_multiplier)
    scale("self_attn.k_proj", config.attention_in_multiplier, config.key_multiplier)
    scale("self_attn.v_proj", config.attention_in_multiplier)
    scale("self_attn.o_proj", of_output=config.attention_out_multiplier)
    scale("feed_forward.gate_proj", of_output=of_gate)
    scale("feed_forward.down_proj", of_output=of_down)
