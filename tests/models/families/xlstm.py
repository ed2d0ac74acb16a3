"""xLSTM: with biases and without, heads whose keys are as wide as their values and half as wide."""

from __future__ import annotations

from typing import Any

from transformers import xLSTMConfig

from tests.models.families.vocabulary import VOCAB


def xlstm_config(**options: Any) -> xLSTMConfig:
    """Transformers' cache takes 64 channels of keys and of values, or a multiple of that."""
    defaults = {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 4, "qk_dim_factor": 1.0,
        "ffn_round_up_to_multiple_of": 8, "ffn_proj_factor": 0.6, "chunk_size": 16,
    }  # fmt: skip
    return xLSTMConfig(**(defaults | options))


CONFIGS = {
    "xlstm": xlstm_config,
    "xlstm-biases": lambda: xlstm_config(
        use_bias=True, num_heads=2, v_dim_factor=2.0, gate_soft_cap=3.0, eps=0.1,
        output_logit_soft_cap=8.0, norm_eps=1e-3, chunk_size=64,
    ),
}  # fmt: skip
