"""Reads ids of special tokens from the configs of models that see."""

from __future__ import annotations

from typing import Any

from hybridmem.models.weights.checkpoint import UnsupportedModelError


def read_token_id(config: Any, name: str) -> int:
    """Return the id of a token that stands in or around pictures. Raises UnsupportedModelError if there is none."""
    found = getattr(config, name)
    if not isinstance(found, int):
        raise UnsupportedModelError(f"{name}={found!r}; pictures need the id of this token")
    return found
