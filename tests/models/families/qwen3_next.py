"""Qwen3-Next: delta mixers with as many value heads as key heads and more, experts in all layers, in
some and in none."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3NextConfig

from tests.models.families.vocabulary import HEADS, SIZES

DELTA_SIZES = SIZES | HEADS | {
    "num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 8, "linear_value_head_dim": 4,
}  # fmt: skip
EXPERT_SIZES = {
    "num_experts": 3,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 14,
}


def qwen3_next_config(**options: Any) -> Qwen3NextConfig:
    """Three delta mixers and an attention, experts in each layer, unless `options` say otherwise."""
    return Qwen3NextConfig(**(DELTA_SIZES | EXPERT_SIZES | {"intermediate_size": 32} | options))


CONFIGS = {
    # Without so large an epsilon, norms of small rows enlarge what bfloat16 rounds, in plain torch as well.
    "qwen3-next": lambda: qwen3_next_config(rms_norm_eps=1e-2),
    "qwen3-next-two-of-four-experts": lambda: qwen3_next_config(
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[3],
        attention_bias=True,
        full_attention_interval=2, linear_conv_kernel_dim=2, linear_num_key_heads=3, linear_num_value_heads=3,
        linear_key_head_dim=48, linear_value_head_dim=16, tie_word_embeddings=True,
    ),
    "qwen3-next-no-experts": lambda: qwen3_next_config(
        num_experts=0, num_experts_per_tok=0, layer_types=["full_attention", "linear_attention", "linear_attention"],
        num_hidden_layers=3,
        linear_conv_kernel_dim=3, linear_num_key_heads=1, linear_num_value_heads=5, num_key_value_heads=6,
        partial_rotary_factor=0.75,
    ),
}  # fmt: skip
