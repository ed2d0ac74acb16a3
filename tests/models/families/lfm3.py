"""LFM3: convolutions, attention over all tokens and over windows, with and without gates and norms of outputs."""

from __future__ import annotations

from typing import Any

from transformers import Lfm3Config

from tests.models.families.vocabulary import HEADS, SIZES

_KINDS = {"C": "conv", "F": "full_attention", "S": "sliding_attention"}


def lfm3_config(layers: str = "CSFC", **options: Any) -> Lfm3Config:
    """C stands for a convolution, F for attention over all tokens, S for attention over a window."""
    defaults = SIZES | HEADS | {
        "intermediate_size": 32, "num_hidden_layers": len(layers), "head_dim": 8, "sliding_window": 7,
        "conv_L_cache": 4, "layer_types": [_KINDS[kind] for kind in layers], "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return Lfm3Config(**(defaults | options))


CONFIGS = {
    "lfm3": lfm3_config,
    "lfm3-biases-untied": lambda: lfm3_config(
        "FCS", conv_bias=True, attention_bias=True, tie_word_embeddings=False, use_sandwich_norm=False,
        use_attention_gate=False, conv_L_cache=2, num_key_value_heads=3, sliding_window=4,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
}  # fmt: skip
