"""gpt-oss: windows and everything in turn, sinks, experts whose outputs all have biases."""

from __future__ import annotations

from typing import Any

from transformers import GptOssConfig

from tests.models.families.vocabulary import HEADS, SIZES


def gpt_oss_config(**options: Any) -> GptOssConfig:
    """A window of seven tokens in the first and the third layer, and all tokens in the second and the fourth."""
    defaults = (
        SIZES
        | HEADS
        | {
            "intermediate_size": 16, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 7,
            "num_local_experts": 3, "num_experts_per_tok": 3, "swiglu_limit": 1.5, "rms_norm_eps": 1e-2,
        }
    )  # fmt: skip
    return GptOssConfig(**(defaults | options))


CONFIGS = {
    # Without so large an epsilon, norms of small rows enlarge what bfloat16 rounds, in plain torch as well.
    "gpt-oss": gpt_oss_config,
    "gpt-oss-two-of-four-experts": lambda: gpt_oss_config(
        num_hidden_layers=3, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        num_local_experts=4, num_experts_per_tok=2, swiglu_alpha=1.1, swiglu_limit=0.8, sliding_window=4,
        num_key_value_heads=3, head_dim=4, attention_bias=False, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}  # fmt: skip
