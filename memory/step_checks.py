"""Checks what models give to the calls of a step."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from hybridmem.memory.errors import StepError


def check_scale(scale: float | None) -> None:
    """Raise StepError unless a scale is None or above 0. For other scales, torch's fused attention returns NaN."""
    if scale is not None and not (isinstance(scale, int | float | np.floating) and 0 < scale < math.inf):
        raise StepError(f"scale={scale!r}; give a positive number, or None for 1 / sqrt(head_dim)")


def check_tensors(**tensors: Tensor) -> None:
    """Raise StepError unless each is a tensor with at least one dimension."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.dim():
            raise StepError(f"{name} is {tensor!r}, not a tensor with one row a token")
