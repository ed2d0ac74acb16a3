"""Multiplies rows by small matrices, one for each head, so that a row has the same bits in any batch, on the CPU.

Torch's own products choose the order of their sums by the number of rows. Here an output's sum begins with its bias and
takes the inputs in order. Four rows share what is loaded of a matrix.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hybridmem.memory.errors import StepError
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.numbers import get
from hybridmem.memory.kernels.cpu.rows import as_array
from hybridmem.memory.kernels.cpu.rules import subroutine
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.cpu.vectors import LANES, load, multiply_add, splat, store

_OUTPUTS = 64
"""How many outputs a task has at most."""

_NO_BIAS = np.empty((0, 0), np.float32)
_0, _1, _2, _3, _4, _LANES, _LAST_LANE = (np.uint64(i) for i in (0, 1, 2, 3, 4, LANES, LANES - 1))


def head_products(x_THN: Tensor, weight_HNL: Tensor, bias_HL: Tensor | None = None) -> Tensor:
    """Return x_h W_h + b_h for each row and head: (T, H, L), in the dtype of x. Sums are in float32."""
    n_rows, n_heads, n_in = x_THN.shape
    n_out = weight_HNL.shape[2]
    if weight_HNL.shape != (n_heads, n_in, n_out) or (bias_HL is not None and bias_HL.shape != (n_heads, n_out)):
        found = None if bias_HL is None else tuple(bias_HL.shape)
        raise StepError(
            f"head_products: rows {tuple(x_THN.shape)}, weights {tuple(weight_HNL.shape)}, bias {found}; give "
            "(tokens, heads, inputs), (heads, inputs, outputs) and (heads, outputs)"
        )
    x, bias = x_THN.float().contiguous(), _NO_BIAS if bias_HL is None else bias_HL.float().contiguous().numpy()
    y_THL = torch.empty(n_rows, n_heads, n_out)
    use_threads(x.numel() * n_out)
    _multiply(x.numpy().reshape(-1), as_array(weight_HNL.contiguous()).reshape(-1), bias, n_in, y_THL.numpy())
    return y_THL if x_THN.dtype is torch.float32 else y_THL.to(x_THN.dtype)


@compiled(parallel=True)
def _multiply(x, weights, bias_HL, n_in, y_THL):
    """Multiply in several threads. A task is some outputs of one head, for all rows."""
    n_rows, n_heads, n_out = y_THL.shape
    n_parts = -(-n_out // _OUTPUTS)
    y = y_THL.reshape(-1)
    for task in prange(n_heads * n_parts):
        h, first = task // n_parts, task % n_parts * _OUTPUTS
        last = min(first + _OUTPUTS, n_out)
        start = np.zeros(_OUTPUTS, np.float32)
        if len(bias_HL) > 0:
            for e in range(last - first):
                start[e] = bias_HL[h, first + e]
        _multiply_part(x, weights, start, n_in, n_heads, n_out, h, first, last, n_rows, y)


@subroutine()
def _multiply_part(x, weights, start, n_in, n_heads, n_out, h, first, last, n_rows, y):
    n_in, n_out, first, last = np.uint64(n_in), np.uint64(n_out), np.uint64(first), np.uint64(last)
    n_rows, apart, own = np.uint64(n_rows), np.uint64(n_heads) * n_in, np.uint64(h) * n_in
    y_apart, y_own, w_own = np.uint64(n_heads) * n_out, np.uint64(h) * n_out, np.uint64(h) * n_in * n_out
    whole, tiled = first + ((last - first) & ~_LAST_LANE), n_rows & ~_3
    for e in range(first, whole, _LANES):
        begin = load(start, e - first)
        for t in range(_0, tiled, _4):
            at = t * apart + own
            x0 = x1 = x2 = x3 = begin
            for n in range(n_in):
                w = load(weights, w_own + n * n_out + e)
                x0 = multiply_add(splat(x[at + n]), w, x0)
                x1 = multiply_add(splat(x[at + apart + n]), w, x1)
                x2 = multiply_add(splat(x[at + _2 * apart + n]), w, x2)
                x3 = multiply_add(splat(x[at + _3 * apart + n]), w, x3)
            place = t * y_apart + y_own + e
            store(y, place, x0)
            store(y, place + y_apart, x1)
            store(y, place + _2 * y_apart, x2)
            store(y, place + _3 * y_apart, x3)
        for t in range(tiled, n_rows):
            at, x0 = t * apart + own, begin
            for n in range(n_in):
                x0 = multiply_add(splat(x[at + n]), load(weights, w_own + n * n_out + e), x0)
            store(y, t * y_apart + y_own + e, x0)
    for e in range(whole, last):  # These outputs do not fill a vector.
        for t in range(n_rows):
            at, total = t * apart + own, start[e - first]
            for n in range(n_in):
                total += x[at + n] * get(weights, w_own + n * n_out + e)
            y[t * y_apart + y_own + e] = total
