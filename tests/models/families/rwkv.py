"""RWKV-4: rescaled and not, tied, with wider and narrower averages."""

from __future__ import annotations

from typing import Any

from transformers import RwkvConfig

from tests.models.families.vocabulary import SIZES


def rwkv_config(**options: Any) -> RwkvConfig:
    return RwkvConfig(**(SIZES | {"num_hidden_layers": 3} | options))


CONFIGS = {
    "rwkv": rwkv_config,
    "rwkv-rescaled-tied": lambda: rwkv_config(
        num_hidden_layers=5, rescale_every=2, intermediate_size=36, tie_word_embeddings=True
    ),
    "rwkv-wide": lambda: rwkv_config(
        attention_hidden_size=40, layer_norm_epsilon=1e-2, rescale_every=0, num_hidden_layers=2
    ),
}
