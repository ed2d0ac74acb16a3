"""Compiles products with weights of 2 to 8 bits for processors with AVX512_VNNI (sums of integers), not tiles.

For few rows, weights go from memory through registers as integers, in two instructions for 32 of them. Turning them
into bfloat16 takes six. So few rows wait only for memory. Many rows are multiplied as pairs of bfloat16, if the
processor can (AVX512_BF16). Both ways read rows whose sums over a group of inputs are exact (`row_units`), so a row has
the same bits in any batch, and the same as with tiles.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from hybridmem.memory.kernels.cpu.parts import compiled, subroutine
from hybridmem.models.products.epilogue import block_epilogue
from hybridmem.models.products.integer_few_rows import MOST_ROWS, sums_of
from hybridmem.models.products.integer_vectors import multiplies_pairs
from hybridmem.models.products.quantised_kernels import multiply_part, sums_of_rows
from hybridmem.models.products.row_ranges import in_range, multiply_back
from hybridmem.models.products.row_units import as_integers, in_units
from hybridmem.models.weights.layouts import BLOCK, GROUP

_AHEAD_BYTES = 4096
"""How many bytes ahead weights are prefetched for few rows.

Many rows keep the processor busy until the weights come.
"""

_AT_ONCE = 8
"""Rows that are multiplied at once: their sums of integers (two each with 4 bits) and floats stay in registers."""

_MOST_AS_INTEGERS = MOST_ROWS if multiplies_pairs() else 1 << 62
"""The most rows that are multiplied as integers. Without pairs of bfloat16 there is no limit."""

_one, _two, _four = (sums_of(n, 1, _AHEAD_BYTES) for n in (1, 2, 4))
_all_at_once = sums_of(_AT_ONCE, 1, _AHEAD_BYTES)


@compiled(parallel=True)
def product(codes, scales, x_TI, bias, activation, n_parts, out_TO):
    """Set out = activation(x W^T + bias), with scales for groups of an output's inputs.

    Args:
        x_TI: rows of bfloat16, of a multiple of 32 inputs.
        others: as for `quantised_kernels.product`.
    """
    n_rows, n_out = out_TO.shape
    n_in, out = x_TI.shape[1], out_TO.reshape(-1)
    if n_rows == 0:
        return
    x, factors = in_range(x_TI.reshape(-1), n_rows, n_in)
    if n_rows <= _MOST_AS_INTEGERS:
        integers, units, row_sums = as_integers(x.view(np.uint32))
        for part in prange(n_parts):
            _multiply_part(
                codes, scales, integers, units, row_sums, factors, n_in, bias, activation, part, n_parts, out, n_rows,
                n_out,
            )  # fmt: skip
        return
    rounded = np.empty_like(x)
    for t in prange(n_rows):
        in_units(x, t * n_in, n_in // GROUP, rounded)
    float_sums = sums_of_rows(codes, rounded, n_rows, n_in)
    for part in prange(n_parts):
        _multiply_many(
            codes, scales, rounded, float_sums, factors, n_in, bias, activation, part, n_parts, out, n_rows, n_out
        )


@subroutine()
def _multiply_part(
    codes, scales, integers, units, row_sums, factors, n_in, bias, activation, part, n_parts, out, n_rows, n_out
):
    """Multiply all rows, which `as_integers` has rounded to integers, by the weights of one part of the outputs."""
    n_blocks, n_groups = (n_out + BLOCK - 1) // BLOCK, n_in // GROUP
    block_codes, block_scales = len(codes) // n_blocks, len(scales) // n_blocks
    sums = np.empty(_AT_ONCE * BLOCK, np.float32)
    for o in range(part * n_blocks // n_parts, (part + 1) * n_blocks // n_parts):
        code, scale, channel, t = o * block_codes, o * block_scales, o * BLOCK, 0
        while t < n_rows:
            left = n_rows - t
            if left >= _AT_ONCE:
                n = _AT_ONCE
                _all_at_once(codes, code, n_groups, scales, scale, block_scales, integers, t, units, row_sums, sums)
            elif left >= 4:
                n = 4
                _four(codes, code, n_groups, scales, scale, block_scales, integers, t, units, row_sums, sums)
            elif left >= 2:
                n = 2
                _two(codes, code, n_groups, scales, scale, block_scales, integers, t, units, row_sums, sums)
            else:
                n = 1
                _one(codes, code, n_groups, scales, scale, block_scales, integers, t, units, row_sums, sums)
            multiply_back(sums, 0, n, factors, t)
            block_epilogue(sums, 0, n, bias, activation, channel, out, t * n_out + channel, n_out)
            t += n


@subroutine()
def _never_called(codes, scales, x, row_sums, factors, n_in, bias, activation, part, n_parts, out, n_rows, n_out):
    """Stands in for `multiply_part` where compiled code must not contain AVX512_BF16. It is never called there."""


_multiply_many = multiply_part if multiplies_pairs() else _never_called
