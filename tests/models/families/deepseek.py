"""DeepSeek-V2 and V3: queries compressed or not, experts in all layers, in some and in none, in groups and not."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV2Config, DeepseekV3Config

from tests.models.families.vocabulary import SIZES

_SIZES = SIZES | {
    "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "first_k_dense_replace": 1, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 12}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 16,
}  # fmt: skip


def deepseek_v2_config(**options: Any) -> DeepseekV2Config:
    return DeepseekV2Config(**(_SIZES | _EXPERTS | {"routed_scaling_factor": 1.5} | options))


def deepseek_v3_config(**options: Any) -> DeepseekV3Config:
    return DeepseekV3Config(**(_SIZES | _EXPERTS | {"n_group": 1, "topk_group": 1} | options))


CONFIGS = {
    "deepseek-v2": deepseek_v2_config,
    "deepseek-v2-three-of-eight-experts-in-groups": lambda: deepseek_v2_config(
        n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, topk_method="group_limited_greedy", n_group=4,
        topk_group=2,
        first_k_dense_replace=0, q_lora_rank=None, rope_parameters=_YARN,
    ),
    "deepseek-v2-no-experts-biases": lambda: deepseek_v2_config(
        first_k_dense_replace=3, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-2,
    ),
    "deepseek-v2-shared-biases": lambda: deepseek_v2_config(
        q_lora_rank=None, attention_bias=True, mlp_bias=True, n_shared_experts=2, qk_nope_head_dim=8, v_head_dim=8,
        num_attention_heads=6,
        num_key_value_heads=6,
    ),
    "deepseek-v3": deepseek_v3_config,
    "deepseek-v3-three-of-eight-experts-in-groups": lambda: deepseek_v3_config(
        n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, first_k_dense_replace=0,
        rope_parameters=_YARN,
        # In bfloat16, close choices differ, as they do in transformers. So they must not weigh too much.
        routed_scaling_factor=0.5,
    ),
    "deepseek-v3-not-interleaved": lambda: deepseek_v3_config(
        rope_interleave=False, norm_topk_prob=False, q_lora_rank=None, num_experts_per_tok=2, attention_bias=True,
        rms_norm_eps=1e-2,
    ),
    "deepseek-v3-no-experts": lambda: deepseek_v3_config(
        first_k_dense_replace=3, tie_word_embeddings=True, qk_rope_head_dim=8
    ),
}  # fmt: skip
