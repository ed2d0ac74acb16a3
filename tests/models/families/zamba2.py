"""Zamba2: one shared block and two, with positions and without, adapters for attention and without."""

from __future__ import annotations

from typing import Any

from transformers import Zamba2Config

from tests.models.families.vocabulary import SIZES


def zamba2_config(layers: str = "HHH", **options: Any) -> Zamba2Config:
    """M stands for a Mamba layer, H for one with a shared block before it."""
    defaults = SIZES | {
        "intermediate_size": 32, "num_hidden_layers": len(layers), "num_attention_heads": 6,
        "layers_block_type": ["hybrid" if kind == "H" else "linear_attention" for kind in layers], "mamba_d_state": 16,
        "n_mamba_heads": 6, "mamba_ngroups": 2, "chunk_size": 8, "num_mem_blocks": 2,
        "use_shared_attention_adapter": True, "adapter_rank": 3, "use_mem_rope": True,
    }  # fmt: skip
    return Zamba2Config(**(defaults | options))


CONFIGS = {
    "zamba2": zamba2_config,
    "zamba2-no-adapters": lambda: zamba2_config(
        "HM", num_mem_blocks=1, use_shared_attention_adapter=False, num_key_value_heads=2, use_mem_rope=False,
        add_bias_linear=True,
        mamba_d_conv=3, mamba_d_state=48, n_mamba_heads=3, mamba_ngroups=3, tie_word_embeddings=False,
        time_step_min=0.2,
        hidden_act="silu",
    ),
    "zamba2-more-blocks-than-layers": lambda: zamba2_config(
        "MH", num_mem_blocks=2, mamba_d_conv=2, mamba_ngroups=1, mamba_expand=3
    ),
}  # fmt: skip
