"""Bamba: attention and Mamba-2 layers, with biases and groups or without."""

from __future__ import annotations

from typing import Any

from transformers import BambaConfig

from tests.models.families.vocabulary import HEADS, SIZES


def bamba_config(**options: Any) -> BambaConfig:
    defaults = SIZES | HEADS | {
        "intermediate_size": 32, "num_hidden_layers": 4, "attn_layer_indices": [1, 3], "mamba_n_heads": 6,
        "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8,
    }  # fmt: skip
    return BambaConfig(**(defaults | options))


CONFIGS = {
    "bamba": bamba_config,
    "bamba-biases": lambda: bamba_config(
        attention_bias=True, mlp_bias=True, mamba_proj_bias=True, mamba_conv_bias=False, mamba_d_conv=3,
        mamba_d_state=48,
        mamba_n_heads=3, mamba_d_head=16, mamba_n_groups=3, tie_word_embeddings=True,
    ),
}  # fmt: skip
