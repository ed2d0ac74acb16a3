"""OLMo 3: attention alone, over a window in most layers, with norms after each part and a rotation for each type."""

from __future__ import annotations

from typing import Any

from transformers import Olmo3Config

from tests.models.families.vocabulary import HEADS, SIZES


def olmo3_config(**options: Any) -> Olmo3Config:
    """A window of seven tokens in the first three layers, and all tokens in the fourth."""
    defaults = (
        SIZES | HEADS | {"intermediate_size": 32, "num_hidden_layers": 4, "sliding_window": 7, "eos_token_id": None}
    )
    return Olmo3Config(**(defaults | options))


CONFIGS = {
    "olmo3": olmo3_config,
    "olmo3-biases-tied": lambda: olmo3_config(
        num_hidden_layers=3, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        num_attention_heads=3, num_key_value_heads=3, sliding_window=4, attention_bias=True, tie_word_embeddings=True,
        hidden_act="gelu", rms_norm_eps=1e-2, max_position_embeddings=64,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
}  # fmt: skip
