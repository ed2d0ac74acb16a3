"""Falcon-H1: every multiplier and bias, the norm before the gate, after it, or none."""

from __future__ import annotations

from typing import Any

from transformers import FalconH1Config

from tests.models.families.vocabulary import HEADS, SIZES

MULTIPLIERS = {
    "embedding_multiplier": 2.0, "lm_head_multiplier": 1.3, "key_multiplier": 0.7, "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 0.8, 1.3, 0.7, 1.4], "mlp_multipliers": [1.25, 0.75],
}  # fmt: skip


def falcon_h1_config(**options: Any) -> FalconH1Config:
    defaults = SIZES | HEADS | {
        "intermediate_size": 32, "num_hidden_layers": 3, "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_n_groups": 2,
        "mamba_d_state": 16, "mamba_chunk_size": 8, "mamba_rms_norm": True,
    }  # fmt: skip
    return FalconH1Config(**(defaults | options))


CONFIGS = {
    "falcon-h1": falcon_h1_config,
    "falcon-h1-biases": lambda: falcon_h1_config(
        **MULTIPLIERS, mamba_norm_before_gate=False, mamba_proj_bias=True, projectors_bias=True, attention_bias=True,
        mlp_bias=True,
        mamba_conv_bias=False, mamba_d_conv=2, mamba_n_heads=3, mamba_n_groups=3, mamba_d_state=48,
        tie_word_embeddings=True,
    ),
    "falcon-h1-gate-only": lambda: falcon_h1_config(
        **MULTIPLIERS, mamba_rms_norm=False, mamba_d_ssm=None, mamba_expand=3, mamba_n_groups=1, mamba_d_conv=3,
        num_key_value_heads=6, head_dim=10, time_step_limit=(0.1, 0.8),
    ),
}  # fmt: skip
