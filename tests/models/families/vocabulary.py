"""Holds what most random checkpoints have in common."""

from __future__ import annotations

from typing import Any

VOCAB = 53
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 24}
"""Sizes of every model that is not about other sizes."""
HEADS: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2}
"""Heads in groups of three, for the same models' attention."""
