"""Zaya: convolutions of two taps and of other numbers, windows, biases, heads in groups of three."""

from __future__ import annotations

from typing import Any

from transformers import ZayaConfig

from tests.models.families.vocabulary import SIZES


def zaya_config(**options: Any) -> ZayaConfig:
    defaults = SIZES | {
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "moe_intermediate_size": 20, "num_experts": 3, "router_hidden_size": 12,
    }  # fmt: skip
    return ZayaConfig(**(defaults | options))


CONFIGS = {
    "zaya": zaya_config,
    "zaya-biases-windows-untied": lambda: zaya_config(
        attention_bias=True, lm_head_bias=True, tie_word_embeddings=False, num_attention_heads=3,
        num_key_value_heads=1, cca_time0=3, cca_time1=4, sliding_window=6, rms_norm_eps=1e-3,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"], hidden_act="gelu",
    ),
    "zaya-one-tap": lambda: zaya_config(cca_time0=1, cca_time1=1, num_hidden_layers=2),
}  # fmt: skip
