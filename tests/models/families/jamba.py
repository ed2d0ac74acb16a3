"""Jamba: with and without experts, attention everywhere, nowhere and in between."""

from __future__ import annotations

from typing import Any

from transformers import JambaConfig

from tests.models.families.vocabulary import HEADS, SIZES


def jamba_config(**options: Any) -> JambaConfig:
    """Attention, Mamba, experts and plain MLPs in three layers, unless `options` say otherwise."""
    defaults = SIZES | HEADS | {
        "intermediate_size": 32, "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 3, "num_experts_per_tok": 3,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_dt_rank": 3,
    }  # fmt: skip
    return JambaConfig(**(defaults | options))


CONFIGS = {
    "jamba": jamba_config,
    "jamba-two-of-four-experts": lambda: jamba_config(
        num_hidden_layers=4, num_key_value_heads=6, attn_layer_period=2, attn_layer_offset=0, expert_layer_period=3,
        expert_layer_offset=2, num_experts=4, num_experts_per_tok=2, mamba_d_state=5, mamba_d_conv=2,
        mamba_conv_bias=False,
        mamba_proj_bias=True, tie_word_embeddings=True,
    ),
    "jamba-all-experts-last-attention": lambda: jamba_config(
        attn_layer_offset=2, expert_layer_period=1, expert_layer_offset=0, num_experts=4, num_experts_per_tok=4,
        mamba_d_state=5,
        mamba_d_conv=3, mamba_expand=3,
    ),
    "jamba-no-experts": lambda: jamba_config(
        num_experts=1, num_experts_per_tok=1, mamba_d_conv=2, mamba_proj_bias=True
    ),
    "jamba-no-attention": lambda: jamba_config(attn_layer_period=8, attn_layer_offset=7, mamba_conv_bias=False),
    "jamba-attention-only": lambda: jamba_config(attn_layer_period=1, attn_layer_offset=0, num_key_value_heads=1),
}  # fmt: skip
