"""DeepSeek-V3.2 and GLM-5: an index in each layer or in some, which leaves most rows of a prompt out."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV32Config, GlmMoeDsaConfig

from tests.models.families.deepseek import _EXPERTS, _SIZES, _YARN

# With few heads, all products of a row with queries are often negative; then rows have equal scores, of which
# transformers chooses any.
_INDEX = {"index_topk": 5, "index_n_heads": 24, "index_head_dim": 8, "n_group": 1, "topk_group": 1}


def deepseek_v32_config(**options: Any) -> DeepseekV32Config:
    return DeepseekV32Config(**(_SIZES | _EXPERTS | _INDEX | {"bos_token_id": None, "eos_token_id": None} | options))


def glm_moe_dsa_config(**options: Any) -> GlmMoeDsaConfig:
    return GlmMoeDsaConfig(**(_SIZES | _EXPERTS | _INDEX | {"bos_token_id": None, "eos_token_id": None} | options))


CONFIGS = {
    "deepseek-v3.2": deepseek_v32_config,
    "deepseek-v3.2-three-of-eight-experts-in-groups": lambda: deepseek_v32_config(
        n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, rope_parameters=_YARN, attention_bias=True,
        mlp_layer_types=["sparse", "dense", "sparse"], routed_scaling_factor=0.5,
    ),
    "glm-moe-dsa": lambda: glm_moe_dsa_config(indexer_types=["full", "shared", "full"]),
    "glm-moe-dsa-no-experts": lambda: glm_moe_dsa_config(
        first_k_dense_replace=3, tie_word_embeddings=True, qk_rope_head_dim=8, index_topk=3, index_head_dim=12,
    ),
}  # fmt: skip
