"""LFM2: short convolutions of several widths, attention in some layers, in all and in none."""

from __future__ import annotations

from typing import Any

from transformers import Lfm2Config, Lfm2MoeConfig

from tests.models.families.vocabulary import HEADS, SIZES


def lfm2_config(**options: Any) -> Lfm2Config:
    defaults = SIZES | HEADS | {
        "intermediate_size": 48, "num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_multiple_of": 20,
    }  # fmt: skip
    return Lfm2Config(**(defaults | options))


def lfm2_moe_config(**options: Any) -> Lfm2MoeConfig:
    defaults = SIZES | HEADS | {
        "intermediate_size": 48, "moe_intermediate_size": 12, "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 3,
        "num_experts_per_tok": 3, "routed_scaling_factor": 1.7,
    }  # fmt: skip
    return Lfm2MoeConfig(**(defaults | options))


CONFIGS = {
    "lfm2": lfm2_config,
    "lfm2-biases-untied": lambda: lfm2_config(
        conv_bias=True, conv_L_cache=4, full_attn_idxs=[0], num_attention_heads=3, num_key_value_heads=3,
        block_ffn_dim_multiplier=1.3,
        tie_word_embeddings=False, num_hidden_layers=3,
    ),
    "lfm2-narrow": lambda: lfm2_config(
        conv_L_cache=2, block_auto_adjust_ff_dim=False, intermediate_size=31, num_key_value_heads=1, hidden_size=36,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
    ),
    "lfm2-no-attention": lambda: lfm2_config(full_attn_idxs=[]),
    "lfm2-moe": lambda: lfm2_moe_config(norm_topk_prob=False),
    "lfm2-moe-three-of-four-experts": lambda: lfm2_moe_config(
        num_experts=4, num_experts_per_tok=3, conv_bias=True, num_dense_layers=0
    ),
    "lfm2-moe-no-bias": lambda: lfm2_moe_config(use_expert_bias=False, conv_L_cache=4, tie_word_embeddings=False),
}  # fmt: skip
