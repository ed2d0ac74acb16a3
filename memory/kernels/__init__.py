"""Kernels: `reference` (plain torch, the oracle) and `cpu` (numba), one signature, chosen by device and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from memory.kernels import reference
from memory.kernels.signature import Erase, FoldedRows, Kernels, PageChoice, PagedBatch, Prepared, Scoring, StateSlots, Tail
from memory.kernels.weights import Weights

__all__ = [
    "Erase",
    "FoldedRows",
    "Kernels",
    "PageChoice",
    "PagedBatch",
    "Prepared",
    "Scoring",
    "StateSlots",
    "Tail",
    "Weights",
    "rms_norm",
    "select_kernels",
]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, n_groups: int = 1, gate: Tensor | None = None) -> Tensor:
    """`Kernels.rms_norm` over the last axis of x (..., E), by whatever kernels suit x."""
    if x.dim() == 2:
        return select_kernels(x.device, x.dtype).rms_norm(x, weight, eps, n_groups=n_groups, gate_TE=gate)
    return rms_norm(x.reshape(-1, x.shape[-1]), weight, eps, n_groups=n_groups, gate=gate).view(x.shape)


def select_kernels(device: torch.device, *dtypes: torch.dtype) -> Kernels:
    """The fastest kernels for tensors of these dtypes on `device`: numba if all are float32 on the CPU, else plain torch."""
    if device.type == "cpu" and set(dtypes) == {torch.float32}:
        from memory.kernels import cpu  # not at import time: a dry run or another device needs no compiler

        cpu.warm_up()
        return cpu
    return reference
