"""Ling 3: decays with a lower bound and without, experts in groups, queries that are compressed or not."""

from __future__ import annotations

from typing import Any

from transformers import BailingHybridConfig

from tests.models.families.kimi_linear import KIMI_SIZES


def bailing_hybrid_config(layers: str = "DAD", **options: Any) -> BailingHybridConfig:
    """D stands for a layer of delta attention, A for one of latent attention."""
    defaults = KIMI_SIZES | {
        "num_hidden_layers": len(layers), "head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "layer_types": ["linear_attention" if kind == "D" else "full_attention" for kind in layers],
    }  # fmt: skip
    return BailingHybridConfig(**(defaults | options))


CONFIGS = {
    # Without so large an epsilon, norms of small rows enlarge what bfloat16 rounds, in plain torch as well.
    "bailing-hybrid": bailing_hybrid_config,
    "bailing-hybrid-two-of-eight-experts-in-groups": lambda: bailing_hybrid_config(
        "DA", q_lora_rank=12, num_local_experts=8, num_experts_per_tok=2, n_group=2, n_shared_experts=2,
        norm_topk_prob=False, routed_scaling_factor=1.3, short_conv_kernel_size=2, kda_safe_gate=False,
        mlp_layer_types=["sparse", "dense"], attention_bias=True, rope_parameters={
            "rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.3, "mscale": 0.7, "rope_theta": 1e4,
            "original_max_position_embeddings": 16,
        },
    ),
}  # fmt: skip
