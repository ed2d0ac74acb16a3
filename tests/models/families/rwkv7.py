"""RWKV-7, which is compared with the oracle beside these tests, because transformers does not know it."""

from __future__ import annotations

from typing import Any

from hybridmem.models.families.rwkv7 import RWKV7Config
from tests.models import rwkv7_oracle
from tests.models.families.vocabulary import SIZES

assert RWKV7Config is rwkv7_oracle.RWKV7Config  # Importing the oracle registers it in transformers' auto classes.


def rwkv7_config(**options: Any) -> RWKV7Config:
    defaults = SIZES | {
        "num_hidden_layers": 3, "head_dim": 8, "intermediate_size": 40, "decay_low_rank_dim": 5,
        "gate_low_rank_dim": 7, "a_low_rank_dim": 4, "v_low_rank_dim": 3,
    }  # fmt: skip
    return RWKV7Config(**(defaults | options))


CONFIGS = {
    "rwkv7": rwkv7_config,
    "rwkv7-small-heads-tied": lambda: rwkv7_config(
        head_dim=4, fuse_norm=False, norm_bias=False, norm_first=False, norm_eps=1e-3, tie_word_embeddings=True
    ),
    "rwkv7-defaults": lambda: rwkv7_config(
        head_dim=None, num_heads=1, hidden_ratio=3, intermediate_size=None, num_hidden_layers=2,
        decay_low_rank_dim=None,
        gate_low_rank_dim=None, a_low_rank_dim=None, v_low_rank_dim=None, value_dim=[24, 24],
    ),
}  # fmt: skip
