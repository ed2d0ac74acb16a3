"""Llama, Mistral, Qwen2 and 3, and Gemma 2 and 3: attention alone, over everything or a window."""

from __future__ import annotations

from typing import Any

from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.models.families.vocabulary import HEADS, SIZES

_SIZES = SIZES | HEADS | {"intermediate_size": 32, "num_hidden_layers": 3, "pad_token_id": 0}


def llama_config(**options: Any) -> LlamaConfig:
    return LlamaConfig(**(_SIZES | options))


def mistral_config(**options: Any) -> MistralConfig:
    return MistralConfig(**(_SIZES | {"sliding_window": 7, "head_dim": 4} | options))


def qwen2_config(**options: Any) -> Qwen2Config:
    return Qwen2Config(**(_SIZES | options))


def qwen3_config(**options: Any) -> Qwen3Config:
    return Qwen3Config(**(_SIZES | {"head_dim": 8} | options))


def gemma3_config(**options: Any) -> Gemma3TextConfig:
    defaults = {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "query_pre_attn_scalar": 5,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
    }
    return Gemma3TextConfig(**(_SIZES | defaults | options))


def gemma2_config(**options: Any) -> Gemma2Config:
    defaults = {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "query_pre_attn_scalar": 5,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
    }
    return Gemma2Config(**(_SIZES | defaults | options))


CONFIGS = {
    "llama": llama_config,
    "llama-biases-tied": lambda: llama_config(
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_key_value_heads=6
    ),
    "llama-3-rope": lambda: llama_config(
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    ),
    "mistral": mistral_config,
    "mistral-without-window": lambda: mistral_config(sliding_window=None, num_key_value_heads=1),
    "qwen2": qwen2_config,
    "qwen2-windows-tied": lambda: qwen2_config(
        use_sliding_window=True, sliding_window=4, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": qwen3_config,
    "qwen3-windows": lambda: qwen3_config(
        use_sliding_window=True, sliding_window=4, max_window_layers=1, attention_bias=True
    ),
    "gemma2": gemma2_config,
    "gemma2-uncapped": lambda: gemma2_config(
        attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True
    ),
    "gemma3": gemma3_config,
    "gemma3-capped": lambda: gemma3_config(
        final_logit_softcapping=6.0, tie_word_embeddings=False,
        layer_types=["full_attention"] + ["sliding_attention"] * 3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}  # fmt: skip
