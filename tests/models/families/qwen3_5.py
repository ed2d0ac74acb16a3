"""Qwen3.5's language model, dense and with experts; with shares of rotary positions and without."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from tests.models.families.qwen3_next import DELTA_SIZES, EXPERT_SIZES

SHARES = {
    "rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75, "mrope_section": [2, 2, 2],
    "mrope_interleaved": True
}  # fmt: skip
"""Rotary positions by time, height and width."""

EYES = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24,
    "num_position_embeddings": 4, "patch_size": 4,
}  # fmt: skip


def qwen3_5_config(**options: Any) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(**(DELTA_SIZES | {"intermediate_size": 32} | options))


def qwen3_5_moe_config(**options: Any) -> Qwen3_5MoeTextConfig:
    return Qwen3_5MoeTextConfig(**(DELTA_SIZES | EXPERT_SIZES | options))


CONFIGS = {
    "qwen3.5": lambda: qwen3_5_config(linear_value_head_dim=12),
    "qwen3.5-biases": lambda: qwen3_5_config(
        num_hidden_layers=3, full_attention_interval=2, attention_bias=True, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16,
        linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=48, linear_conv_kernel_dim=2,
        tie_word_embeddings=True,
        rope_parameters=SHARES,
    ),
    "qwen3.5-moe": lambda: qwen3_5_moe_config(linear_num_value_heads=2, linear_conv_kernel_dim=3),
    "qwen3.5-moe-two-of-three-experts": lambda: qwen3_5_moe_config(
        num_hidden_layers=2, full_attention_interval=2, num_experts=3, num_experts_per_tok=2
    ),
}  # fmt: skip
