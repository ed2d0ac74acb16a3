"""Granite 4: with positions and without, with all experts, some and none, and every multiplier."""

from __future__ import annotations

from typing import Any

from transformers import GraniteMoeHybridConfig

from tests.models.families.vocabulary import HEADS, SIZES


def granite_config(**options: Any) -> GraniteMoeHybridConfig:
    defaults = SIZES | HEADS | {
        "intermediate_size": 16, "shared_intermediate_size": 32, "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8, "num_local_experts": 3,
        "num_experts_per_tok": 3, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
    }  # fmt: skip
    return GraniteMoeHybridConfig(**(defaults | options))


CONFIGS = {
    "granite-moe-hybrid": granite_config,
    "granite-moe-hybrid-rope-two-of-four-experts": lambda: granite_config(
        position_embedding_type="rope", num_local_experts=4, num_experts_per_tok=2, attention_bias=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False, mamba_d_conv=2, mamba_n_heads=3, mamba_n_groups=3, mamba_d_state=48,
        tie_word_embeddings=True,
        logits_scaling=1.5,
    ),
    "granite-moe-hybrid-no-experts": lambda: granite_config(
        num_local_experts=0, num_key_value_heads=3, mamba_n_groups=1, mamba_n_heads=12, mamba_d_conv=3,
        time_step_limit=(0.1, 0.8),
        layer_types=["full_attention", "linear_attention", "linear_attention", "linear_attention"],
    ),
}  # fmt: skip
