"""Lara Mini: windows and everything, as many value heads as key heads and more. transformers 5.23 does not have it."""

from __future__ import annotations

from typing import Any

import transformers

from tests.models.families.qwen3_next import DELTA_SIZES, EXPERT_SIZES

_KINDS = {"D": "linear_attention", "S": "sliding_attention", "F": "full_attention"}


def lara_mini_config(layers: str = "DSDF", **options: Any) -> transformers.PreTrainedConfig:
    """D stands for a delta mixer, S for attention over a window, F for attention over everything."""
    defaults = (
        DELTA_SIZES
        | EXPERT_SIZES
        | {
            "num_hidden_layers": len(layers), "layer_types": [_KINDS[kind] for kind in layers], "sliding_window": 7,
            "eos_token_id": None, "rms_norm_eps": 1e-2,
        }
    )  # fmt: skip
    return transformers.LaraMiniConfig(**(defaults | options))


CONFIGS = {
    # Without so large an epsilon, norms of small rows enlarge what bfloat16 rounds, in plain torch as well.
    "lara-mini": lara_mini_config,
    "lara-mini-two-of-four-experts": lambda: lara_mini_config(
        "FDS", num_experts=4, num_experts_per_tok=2, norm_topk_prob=False, attention_bias=True,
        tie_word_embeddings=False, linear_num_key_heads=3, linear_num_value_heads=3, linear_conv_kernel_dim=2,
        sliding_window=4, num_key_value_heads=3,
    ),
}  # fmt: skip
if not hasattr(transformers, "LaraMiniConfig"):
    CONFIGS = {}
