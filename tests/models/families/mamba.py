"""Mamba, FalconMamba and Mamba-2."""

from __future__ import annotations

from typing import Any

from transformers import FalconMambaConfig, Mamba2Config, MambaConfig

from tests.models.families.vocabulary import SIZES


def mamba_config(**options: Any) -> MambaConfig:
    return MambaConfig(**(SIZES | {"num_hidden_layers": 3} | options))


def mamba2_config(**options: Any) -> Mamba2Config:
    defaults = SIZES | {
        "num_hidden_layers": 3, "num_heads": 6, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 8,
    }  # fmt: skip
    return Mamba2Config(**(defaults | options))


def falcon_mamba_config(**options: Any) -> FalconMambaConfig:
    return FalconMambaConfig(**(SIZES | {"num_hidden_layers": 3} | options))


CONFIGS = {
    "mamba": mamba_config,
    "mamba-bias-untied": lambda: mamba_config(
        use_bias=True,
        use_conv_bias=False,
        tie_word_embeddings=False,
        state_size=5,
        conv_kernel=2,
        residual_in_fp32=False,
    ),
    "mamba-wide": lambda: mamba_config(
        expand=3, conv_kernel=3, state_size=5, time_step_rank=7, tie_word_embeddings=False
    ),
    # So large an epsilon shows whether the norm's own epsilon is used.
    "falcon-mamba": lambda: falcon_mamba_config(mixer_rms_eps=0.1),
    "falcon-mamba-wide": lambda: falcon_mamba_config(
        expand=3, conv_kernel=3, state_size=5, time_step_rank=7, tie_word_embeddings=False, use_bias=True,
        use_conv_bias=False, residual_in_fp32=False,
    ),
    "mamba2": mamba2_config,
    "mamba2-48-states": lambda: mamba2_config(
        state_size=48, n_groups=3, use_bias=True, use_conv_bias=False, conv_kernel=2
    ),
    "mamba2-tied": lambda: mamba2_config(
        num_heads=3,
        head_dim=16,
        n_groups=1,
        conv_kernel=3,
        tie_word_embeddings=True,
        residual_in_fp32=False,
        time_step_limit=(0.1, 0.8),
    ),
}  # fmt: skip
