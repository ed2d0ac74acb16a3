"""RecurrentGemma: windows shorter than the prompt, recurrences wider than the model, every width of the convolution."""

from __future__ import annotations

from typing import Any

from transformers import RecurrentGemmaConfig

from tests.models.families.vocabulary import SIZES


def recurrent_gemma_config(**options: Any) -> RecurrentGemmaConfig:
    defaults = SIZES | {
        "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1,
        "attention_window_size": 7,
    }  # fmt: skip
    return RecurrentGemmaConfig(**(defaults | options))


CONFIGS = {
    "recurrent-gemma": recurrent_gemma_config,
    "recurrent-gemma-wide": lambda: recurrent_gemma_config(
        num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, lru_width=48, conv1d_width=2,
        attention_window_size=2,
        attention_bias=True, logits_soft_cap=5.0, block_types=["attention", "recurrent"], rms_norm_eps=1e-3,
        hidden_activation="silu", rope_parameters={
            "rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0
        },
    ),
    "recurrent-gemma-untied": lambda: recurrent_gemma_config(
        num_attention_heads=2, num_key_value_heads=2, conv1d_width=3, attention_window_size=30,
        tie_word_embeddings=False
    ),
    "recurrent-gemma-no-attention": lambda: recurrent_gemma_config(
        block_types=["recurrent"], num_hidden_layers=2, conv1d_width=1
    ),
}  # fmt: skip
