"""Inkling, Inkling 2 and its loop: windows and all tokens, biases that queries compute, experts, convolutions."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import Inkling2TextConfig, InklingTextConfig

from tests.models.families.vocabulary import HEADS, SIZES

_KINDS = {"F": "hybrid", "S": "hybrid_sliding"}


def inkling_config(layers: str = "SFS", feed_forward: str = "DEE", **options: Any) -> InklingTextConfig:
    """F stands for attention over all tokens, S for attention over a window; D for a dense MLP, E for experts."""
    defaults = SIZES | HEADS | {
        "num_hidden_layers": len(layers), "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
        "swa_head_dim": 4, "sliding_window_size": 7, "d_rel": 3, "rel_extent": 9, "intermediate_size": 32,
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "logits_mup_width_multiplier": 0.4, "rms_norm_eps": 1e-3, "bos_token_id": None, "eos_token_id": None,
        "layer_types": [_KINDS[kind] for kind in layers],
        "mlp_layer_types": ["dense" if kind == "D" else "sparse" for kind in feed_forward],
    }  # fmt: skip
    return InklingTextConfig(**(defaults | options))


def inkling2_config(
    layers: str = "SFSF", kind: str = "Inkling2TextConfig", **options: Any
) -> Inkling2TextConfig | transformers.Inkling2LoopTextConfig:
    """F stands for attention over all tokens, S for attention over a window."""
    defaults = SIZES | HEADS | {
        "num_hidden_layers": len(layers), "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
        "swa_head_dim": 4, "sliding_window_size": 7, "d_rel": 3, "rel_extent": 9, "moe_intermediate_size": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 4, "route_scale": 2.0, "rms_norm_eps": 1e-3,
        "log_scaling_n_floor": 6, "log_scaling_alpha": 0.4, "n_layers_per_attn_res_block": 2,
        "qk_l2_clip_threshold": 3.0, "rel_l2_clip_threshold": 1.5, "unpadded_vocab_size": 53, "vocab_size": 56,
        "layer_types": [_KINDS[kind] for kind in layers], "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    config: Inkling2TextConfig = getattr(transformers, kind)(**(defaults | options))
    return config


CONFIGS = {
    "inkling-two-of-four-experts": inkling_config,
    "inkling-log-scale": lambda: inkling_config(
        "FS", "ED", log_scaling_n_floor=6, log_scaling_alpha=0.7, vocab_size=56, unpadded_vocab_size=53, rel_extent=40,
        conv_kernel_size=2, n_shared_experts=1, num_experts_per_tok=1, route_scale=2.0, hidden_act="gelu",
        num_key_value_heads=3, sliding_window_size=4,
    ),
    "inkling2": inkling2_config,
    "inkling2-three-of-four-experts": lambda: inkling2_config(
        "FSF", conv_kernel_size=2, n_layers_per_attn_res_block=1, mlp_gate_softcap=1.5, mlp_up_softcap=2.0,
        final_logit_softcapping=4.0, num_experts_per_tok=3, d_rel=4, rel_extent=30, sliding_window_size=4,
        rel_l2_clip_threshold=0.7, num_key_value_heads=1,
    ),
    "inkling2-loop": lambda: inkling2_config(
        "SFSF", "Inkling2LoopTextConfig", n_layers_per_attn_res_block=1, loop_layer_index_start=1,
        loop_layer_index_end=3, loop_num_passes=3, loop_gate_rank=5, rms_norm_eps=1e-2,
    ),
    "inkling2-loop-blocks-of-two": lambda: inkling2_config(
        "FSFS", "Inkling2LoopTextConfig", loop_layer_index_start=2, loop_layer_index_end=4, loop_num_passes=2,
        loop_gate_rank=3, rms_norm_eps=1e-2,
    ),
}  # fmt: skip
if not hasattr(transformers, "Inkling2LoopTextConfig"):  # Transformers 5.23 does not have it.
    CONFIGS = {name: make for name, make in CONFIGS.items() if not name.startswith("inkling2-loop")}
