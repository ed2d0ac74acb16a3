"""Nemotron-H: all four kinds of layers, experts in groups and in a latent space."""

from __future__ import annotations

from typing import Any

from transformers import NemotronHConfig

from tests.models.families.vocabulary import HEADS, SIZES


def nemotron_config(**options: Any) -> NemotronHConfig:
    defaults = SIZES | HEADS | {
        "hybrid_override_pattern": "M-M*E", "head_dim": 8, "intermediate_size": 32, "ssm_state_size": 16,
        "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 3,
        "num_experts_per_tok": 3, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 20,
        "routed_scaling_factor": 2.5,
    }  # fmt: skip
    return NemotronHConfig(**(defaults | options))


CONFIGS = {
    "nemotron-h": nemotron_config,
    "nemotron-h-two-of-eight-experts": lambda: nemotron_config(
        hybrid_override_pattern="*EME", n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2,
        moe_latent_size=16,
        # In bfloat16, close choices differ, so experts must not weigh too much.
        norm_topk_prob=False, routed_scaling_factor=0.15, use_conv_bias=False, conv_kernel=2, ssm_state_size=48,
        use_bias=True, mamba_proj_bias=True, mlp_bias=True, mamba_num_heads=3, mamba_head_dim=16, n_groups=3,
    ),
    "nemotron-h-dt-floor": lambda: nemotron_config(
        hybrid_override_pattern="MM*-", time_step_min=0.2, conv_kernel=3, n_groups=1, residual_in_fp32=True,
        num_key_value_heads=6,
        head_dim=5,
    ),
}  # fmt: skip
