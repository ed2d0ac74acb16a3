"""Computes root-mean-square norms in one pass on the CPU; torch takes six operators, which is slow for few rows."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from memory.kernels import checks
from memory.kernels.cpu.compiled import compiled
from memory.kernels.cpu.numbers import get
from memory.kernels.cpu.rows import as_array, as_flat, copy_
from memory.kernels.cpu.threads import ELEMENTWISE, REDUCING, use_threads
from memory.kernels.signature import Prepared

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


def rms_norm(
    x_TE: Tensor, weight_E: Prepared | None, eps: float, *, n_groups: int = 1, gate_TE: Tensor | None = None
) -> Tensor:
    checks.rms_norm(x_TE, weight_E, n_groups, gate_TE, checks.FLOATS_UP_TO_32_BITS)
    n_rows, n_elements = x_TE.shape
    out_TE = torch.empty(n_rows, n_elements, dtype=x_TE.dtype)
    x, x_stride = as_flat(x_TE)
    gate, gate_stride = (x[:0], 0) if gate_TE is None else as_flat(gate_TE)
    use_threads(4 * n_rows * n_elements)
    weight = x[:0] if weight_E is None else as_array(weight_E)
    _rms_norm(x, x_stride, gate, gate_stride, weight, np.float32(eps), n_elements // n_groups, as_array(out_TE))
    return out_TE


@compiled(parallel=True, fastmath=ELEMENTWISE, error_model="numpy")
def _rms_norm(x, x_stride, gate, gate_stride, weight, eps, n_part, out_TE):  # type: ignore[no-untyped-def]
    n_rows, n_elements = out_TE.shape
    for t in prange(n_rows):
        out = np.empty(n_elements, np.float32)
        copy_(out, x[t * x_stride : t * x_stride + n_elements])
        if len(gate) > 0:
            _multiply_(out, gate[t * gate_stride : t * gate_stride + n_elements])
        for first in range(0, n_elements, n_part):
            part = out[first : first + n_part]
            _scale_(part, _ONE / np.sqrt(_sum_of_squares(part) / np.float32(n_part) + eps))
        if len(weight) > 0:
            _multiply_(out, weight)
        copy_(out_TE[t], out)


@njit(fastmath=REDUCING)
def _sum_of_squares(x):  # type: ignore[no-untyped-def]
    total = _ZERO
    for e in range(len(x)):
        total += x[e] * x[e]
    return total


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _multiply_(x, y):  # type: ignore[no-untyped-def]
    for e in range(len(x)):
        x[e] *= get(y, e)


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _scale_(x, factor):  # type: ignore[no-untyped-def]
    for e in range(len(x)):
        x[e] *= factor
