"""MiniMax: lightning attention first and between, factors of residuals, a window, more experts than are chosen."""

from __future__ import annotations

from typing import Any

from transformers import MiniMaxConfig

from tests.models.families.vocabulary import HEADS, SIZES


def minimax_config(layers: str = "LFL", **options: Any) -> MiniMaxConfig:
    """L stands for a layer of lightning attention, F for one of softmax attention."""
    defaults = SIZES | HEADS | {
        "intermediate_size": 12, "num_hidden_layers": len(layers), "num_local_experts": 3, "num_experts_per_tok": 3,
        "layer_types": ["linear_attention" if kind == "L" else "full_attention" for kind in layers], "block_size": 8,
    }  # fmt: skip
    return MiniMaxConfig(**(defaults | options))


CONFIGS = {
    "minimax": minimax_config,
    "minimax-two-of-four-experts": lambda: minimax_config(
        "FLL", num_local_experts=4, num_experts_per_tok=2, sliding_window=7, head_dim=8, num_attention_heads=3,
        num_key_value_heads=1, tie_word_embeddings=True, full_attn_alpha_factor=0.7, full_attn_beta_factor=1.3,
        linear_attn_alpha_factor=1.2, linear_attn_beta_factor=0.8, mlp_alpha_factor=0.9, mlp_beta_factor=1.1,
    ),
}  # fmt: skip
