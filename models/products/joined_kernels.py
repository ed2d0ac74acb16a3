"""Compiles products with several weights that share their rows. Each weight writes its part of the outputs.

Callers see a single weight, whose codes are the fields of its pieces (`fields`).
"""

from __future__ import annotations

import numpy as np

from hybridmem.memory.kernels.cpu.parts import array_at, call_at, compiled, move, subroutine
from hybridmem.models.products.fields import CODES, FIELDS, KERNEL, N_OUT, SCALES, SHORTS, field_array, keep

_BYTES = np.empty(0, np.uint8)


@compiled()
def product(codes, scales, x_TI, bias, activation, n_parts, out_TO):
    """Set out = activation(x W^T + bias). Arguments are those of `quantised_kernels.product`."""
    n_rows, n_out = out_TO.shape
    fields, out, first = codes.view(np.int64), out_TO.reshape(-1), 0
    for at in range(0, len(fields), FIELDS):
        n = fields[at + N_OUT]
        own = out[first : first + n] if n_rows == 1 else np.empty(n_rows * n, out.dtype)
        call_at(fields[at + KERNEL], (
            field_array(fields, at + CODES, _BYTES), field_array(fields, at + SCALES, SHORTS), x_TI,
            bias[first : first + n], activation, n_parts, own.reshape((n_rows, n)),
        ))  # fmt: skip
        if n_rows > 1:
            _spread(own, n_rows, n, out, first, n_out)
        first += n


@compiled()
def product_in_tiles(codes, scales, x_at, n_rows, n_pairs, shape, bias, activation, n_parts, out_at, n_out, like):
    """Do the same with kernels that multiply tiles. The arguments are those of `integer_tile_kernels.product`."""
    fields, out, first = codes.view(np.int64), array_at(out_at, n_rows * n_out, like), 0
    for at in range(0, len(fields), FIELDS):
        n = fields[at + N_OUT]
        own = out[first : first + n] if n_rows == 1 else np.empty(n_rows * n, out.dtype)
        call_at(fields[at + KERNEL], (
            field_array(fields, at + CODES, _BYTES), field_array(fields, at + SCALES, SHORTS), x_at, n_rows, n_pairs,
            shape, bias[first : first + n], activation, n_parts, own.ctypes.data, n, like,
        ))  # fmt: skip
        if n_rows > 1:
            _spread(own, n_rows, n, out, first, n_out)
        keep(own)
        first += n


@subroutine()
def _spread(own, n_rows, n, out, first, n_out):
    """Copy a piece's outputs to their places in rows of all outputs."""
    for t in range(n_rows):
        for i in range(n):
            move(out[t * n_out + first : t * n_out + first + n], own[t * n : (t + 1) * n], i)
