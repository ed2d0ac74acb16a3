"""Zamba: the shared block in the first of the layers and in a later one, mixers of one head and of several."""

from __future__ import annotations

from typing import Any

from transformers import ZambaConfig

from tests.models.families.vocabulary import SIZES


def zamba_config(layers: str = "HMH", **options: Any) -> ZambaConfig:
    """M stands for a Mamba layer, H for one with the shared block before it."""
    defaults = SIZES | {
        "intermediate_size": 32, "num_hidden_layers": len(layers), "num_attention_heads": 6, "num_key_value_heads": 6,
        "mamba_d_state": 16, "n_mamba_heads": 2,
        "layers_block_type": ["hybrid" if kind == "H" else "linear_attention" for kind in layers],
    }  # fmt: skip
    return ZambaConfig(**(defaults | options))


CONFIGS = {
    "zamba": zamba_config,
    "zamba-one-head": lambda: zamba_config(
        "MH", n_mamba_heads=1, num_key_value_heads=2, mamba_proj_bias=True, mamba_conv_bias=False, mamba_d_conv=3,
        mamba_d_state=5, mamba_dt_rank=7, mamba_expand=3, tie_word_embeddings=False, hidden_act="silu",
        attention_head_dim=4,
    ),
    "zamba-three-heads": lambda: zamba_config("MHH", n_mamba_heads=3, mamba_d_conv=2),
}  # fmt: skip
