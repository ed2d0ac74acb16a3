"""Computes root-mean-square norms in one pass on the CPU. torch takes six operators, which is slow for few rows."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.numbers import array_at, get
from hybridmem.memory.kernels.cpu.rows import LIKE, as_array, copy_
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, REDUCING, subroutine
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.signature import Prepared

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


def rms_norm(
    x_TE: Tensor, weight_E: Prepared | None, eps: float, *, n_groups: int = 1, gate_TE: Tensor | None = None
) -> Tensor:
    checks.rms_norm(x_TE, weight_E, n_groups, gate_TE, checks.FLOATS_UP_TO_32_BITS)
    n_rows, n_elements = x_TE.shape
    out_TE = torch.empty(n_rows, n_elements, dtype=x_TE.dtype)
    x = _with_whole_rows(x_TE)
    gate = None if gate_TE is None else _with_whole_rows(gate_TE)
    use_threads(4 * n_rows * n_elements)
    like = LIKE[x.dtype]
    _rms_norm(
        x.data_ptr(), x.stride(0), like, 0 if gate is None else gate.data_ptr(), 0 if gate is None else gate.stride(0),
        like if gate is None else LIKE[gate.dtype], like if weight_E is None else as_array(weight_E), np.float32(eps),
        n_elements // n_groups, out_TE.data_ptr(), n_rows, n_elements,
    )  # fmt: skip
    return out_TE


def norm_parts(x_TE: Tensor, weight_E: Prepared, eps: float, ends_P: Int64s) -> Tensor:
    """Compute `rms_norm` of each part of a row. `ends_P` are the ends of the parts, and the last is the row's end."""
    checks.rms_norm(x_TE, weight_E, 1, None, checks.FLOATS_UP_TO_32_BITS)
    n_rows, n_elements = x_TE.shape
    x, out_TE = x_TE.contiguous(), torch.empty(n_rows, n_elements, dtype=x_TE.dtype)
    like = LIKE[x.dtype]
    norm_parts_at(x.data_ptr(), like, as_array(weight_E), np.float32(eps), ends_P, out_TE.data_ptr(), n_rows)
    return out_TE


@compiled(ELEMENTWISE)
def norm_parts_at(x_at, like, weight, eps, ends, out_at, n_rows):
    n = len(weight)
    x, out_TE, out = array_at(x_at, n_rows * n, like), array_at(out_at, n_rows * n, like), np.empty(n, np.float32)
    for t in range(n_rows):
        copy_(out, x[t * n : (t + 1) * n])
        first = 0
        for end in ends:
            part = out[first:end]
            _scale_(part, _ONE / np.sqrt(_sum_of_squares(part) / np.float32(end - first) + eps))
            first = end
        _multiply_(out, weight)
        copy_(out_TE[t * n : (t + 1) * n], out)


def _with_whole_rows(x_TE: Tensor) -> Tensor:
    """Return x, or a copy in which the elements of each row are contiguous."""
    return x_TE if x_TE.stride(1) == 1 or x_TE.is_contiguous() else x_TE.contiguous()


@compiled(ELEMENTWISE, parallel=True)
def _rms_norm(x_at, x_stride, x_like, gate_at, gate_stride, gate_like, weight, eps, n_part, out_at, n_rows, n_elements):
    x = array_at(x_at, n_rows * x_stride + n_elements, x_like)
    gate = array_at(gate_at, n_rows * gate_stride + n_elements, gate_like)
    out_TE = array_at(out_at, n_rows * n_elements, x_like)
    n_gates = n_elements if gate_at != 0 else 0
    for t in prange(n_rows):
        norm_row(
            x[t * x_stride : t * x_stride + n_elements], gate[t * gate_stride : t * gate_stride + n_gates], weight, eps,
            n_part, np.empty(n_elements, np.float32), out_TE[t * n_elements : (t + 1) * n_elements],
        )  # fmt: skip


@subroutine(ELEMENTWISE)
def norm_row(x, gate, weight, eps, n_part, scratch, out):
    """Multiply a row by its gate, and normalize each part of it. Gate and weight may be empty. `scratch` is float32."""
    copy_(scratch, x)
    if len(gate) > 0:
        _multiply_(scratch, gate)
    for first in range(0, len(x), n_part):
        part = scratch[first : first + n_part]
        _scale_(part, _ONE / np.sqrt(_sum_of_squares(part) / np.float32(n_part) + eps))
    if len(weight) > 0:
        _multiply_(scratch, weight)
    copy_(out, scratch)


@subroutine(REDUCING)
def _sum_of_squares(x):
    total = _ZERO
    for e in range(len(x)):
        total += x[e] * x[e]
    return total


@subroutine(ELEMENTWISE)
def _multiply_(x, y):
    for e in range(len(x)):
        x[e] *= get(y, e)


@subroutine(ELEMENTWISE)
def _scale_(x, factor):
    for e in range(len(x)):
        x[e] *= factor
