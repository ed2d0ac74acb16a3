"""Checks what models give to the calls of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

import numpy as np
import torch
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


def check_scoring(
    q: Tensor, scale: float | None, softcap: float | None, sinks: Tensor | None, bias: Tensor | None
) -> None:
    """Raise StepError unless the options of `Step.attend` fit queries q (T, H, D)."""
    check_scale(scale)
    if softcap is not None and not (isinstance(softcap, int | float) and softcap > 0):
        raise StepError(f"softcap={softcap!r}; give a positive number, or None for no cap")
    for what, table in (("sinks", sinks), ("bias", bias)):
        if table is not None and not (isinstance(table, Tensor) and table.dtype == torch.float32):
            found = table.dtype if isinstance(table, Tensor) else table
            raise StepError(f"{what} is no float32 tensor but {found!r}")
    n_heads = q.shape[1] if q.dim() > 1 else 0
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise StepError(f"sinks have shape {tuple(sinks.shape)}; give one for each of {n_heads} query heads")
    if bias is not None and (bias.shape[:-1] not in (q.shape[1:2], q.shape[:2]) or not bias.shape[-1]):
        raise StepError(
            f"bias has shape {tuple(bias.shape)}; give ({n_heads} query heads, distances), or that for each token"
        )


def check_served(places: Mapping[tuple[int, str, str | None], object], served: Set[object]) -> None:
    """Raise StepError if a layer memory was not used in a step, for it would lack the step's tokens for ever.

    Args:
        places: what serves each call of the model, by layer, kind and name.
        served: those of them that were used.
    """
    for (layer, kind, name), place in places.items():
        if place not in served:
            raise StepError(
                f"the step ended before the {kind} memory {name!r} of layer {layer} was used; run the whole model "
                "inside the step. Every sequence is as it was"
            )
