"""OLMo Hybrid: with positions and without, states that may be turned around or not, heads that share keys or not."""

from __future__ import annotations

from typing import Any

from transformers import OlmoHybridConfig

from tests.models.families.qwen3_next import DELTA_SIZES


def olmo_hybrid_config(layers: str = "DAD", **options: Any) -> OlmoHybridConfig:
    """D stands for a delta mixer, A for attention."""
    defaults = DELTA_SIZES | {
        "intermediate_size": 32, "num_hidden_layers": len(layers), "pad_token_id": None, "eos_token_id": None,
        "layer_types": ["linear_attention" if kind == "D" else "full_attention" for kind in layers],
    }  # fmt: skip
    defaults.pop("head_dim")
    return OlmoHybridConfig(**(defaults | options))


CONFIGS = {
    # Without so large an epsilon, norms of small rows enlarge what bfloat16 rounds, in plain torch as well.
    "olmo-hybrid": lambda: olmo_hybrid_config(rms_norm_eps=1e-2),
    "olmo-hybrid-rope": lambda: olmo_hybrid_config(
        "ADA", rope_parameters={"rope_type": "default", "rope_theta": 1e4}, linear_allow_neg_eigval=False,
        attention_bias=True, linear_num_key_heads=3, linear_num_value_heads=3,
        linear_conv_kernel_dim=2, num_key_value_heads=6, rms_norm_eps=1e-2,
    ),
}  # fmt: skip
