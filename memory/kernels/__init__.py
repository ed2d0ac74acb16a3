"""Kernels: `reference` (plain torch, the oracle) and `cpu` (numba), one signature, chosen by device and dtype."""

from __future__ import annotations

import torch

from memory.kernels import reference
from memory.kernels.signature import Erase, Kernels, PagedBatch, Prepared, StateSlots
from memory.kernels.weights import Weights

__all__ = ["Erase", "Kernels", "PagedBatch", "Prepared", "StateSlots", "Weights", "select_kernels"]


def select_kernels(device: torch.device, *dtypes: torch.dtype) -> Kernels:
    """The fastest kernels for tensors of these dtypes on `device`: numba if all are float32 on the CPU, else plain torch."""
    if device.type == "cpu" and set(dtypes) == {torch.float32}:
        from memory.kernels import cpu  # not at import time: a dry run or another device needs no compiler

        cpu.warm_up()
        return cpu
    return reference
