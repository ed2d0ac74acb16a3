"""Kimi Linear: with experts in some layers and in none, queries that are compressed or not."""

from __future__ import annotations

from typing import Any

from transformers import KimiLinearConfig

from tests.models.families.vocabulary import SIZES

KIMI_SIZES = SIZES | {
    "intermediate_size": 32, "num_attention_heads": 6, "num_key_value_heads": 6, "kv_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "moe_intermediate_size": 12, "num_local_experts": 3,
    "num_experts_per_tok": 3, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "rms_norm_eps": 1e-2,
}  # fmt: skip


def kimi_linear_config(layers: str = "DAD", **options: Any) -> KimiLinearConfig:
    """D stands for a layer of delta attention, A for one of latent attention."""
    defaults = KIMI_SIZES | {
        "num_hidden_layers": len(layers), "linear_num_heads": 3, "linear_head_dim": 8,
        "layer_types": ["linear_attention" if kind == "D" else "full_attention" for kind in layers],
    }  # fmt: skip
    return KimiLinearConfig(**(defaults | options))


CONFIGS = {
    # Without so large an epsilon, norms of small rows enlarge what bfloat16 rounds, in plain torch as well.
    "kimi-linear": kimi_linear_config,
    "kimi-linear-two-of-eight-experts-in-groups": lambda: kimi_linear_config(
        "AD", q_lora_rank=12, num_local_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=2,
        norm_topk_prob=False, routed_scaling_factor=1.3, linear_conv_kernel_dim=2,
        mlp_layer_types=["sparse", "dense"], attention_bias=True,
    ),
}  # fmt: skip
