"""Brings rows into the range in which the sums of their products with 8-bit integers are finite numbers.

The sum of a row times integers is up to 127 times as large as the sum of the row times the weights, before it is
multiplied by the scale. So it may be infinite where the result is not. Also, instructions for bfloat16 read denormal
numbers as zero. So a row whose largest number is very large or very small is multiplied by a power of two, which is
exact, and its sums are multiplied back. All other rows stay as they are. A quick test shows whether all rows may stay.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import prange, types

from hybridmem.memory.kernels.cpu.parts import element_at, get, put, subroutine, untyped_intrinsic
from hybridmem.models.products.integer_vectors import I16, I32, I64, call
from hybridmem.models.products.tile_kernels import add_while
from hybridmem.models.weights.layouts import BLOCK, GROUP

_BIAS, _REACH = 127, 90
_SHIFT, _BACK = np.float32(2.0**64), np.float32(2.0**-64)
_ONE = np.float32(1.0)
_MOST_ALONE = 32
"""The most rows that one thread checks faster than other threads can be woken."""


@untyped_intrinsic
def _exponent(typing_context, x, first, n_groups):
    """Return the biased exponent of the largest of a row's numbers, or `_BIAS` if all are zero. Nothing is checked.

    The row has `n_groups` times 32 numbers from `first` on, of float32, or of bfloat16 as uint16.
    """

    def codegen(context, builder, signature, arguments):
        b, is_half = builder, x.dtype == types.uint16
        element, n_lanes = (I16, 2 * BLOCK) if is_half else (I32, BLOCK)
        kind, n_vectors = ir.VectorType(element, n_lanes), GROUP // n_lanes
        sizes = ir.Constant(kind, [0x7FFF if is_half else 0x7FFFFFFF] * n_lanes)
        source = b.bitcast(element_at(context, b, x, *arguments[:2]), kind.as_pointer())

        def look(group: ir.Value, _: int, largest: list[ir.Value]) -> list[ir.Value]:
            for i in range(n_vectors):
                at = b.gep(source, [b.add(b.mul(group, I64(n_vectors)), I64(i))])
                own = b.and_(b.load(at, align=2 if is_half else 4), sizes)
                largest = [b.select(b.icmp_unsigned(">", own, largest[0]), own, largest[0])]
            return largest

        nothing = ir.Constant(kind, [0] * n_lanes)
        _, (largest,) = add_while(b, look, I64(0), arguments[2], 1, [nothing])
        name = f"llvm.vector.reduce.umax.v{n_lanes}i{element.width}"
        bits = b.zext(call(b, name, element, largest), I64)
        return b.select(b.icmp_unsigned("==", bits, I64(0)), I64(_BIAS), b.lshr(bits, I64(7 if is_half else 23)))

    return types.int64(x, types.int64, types.int64), codegen


@subroutine(parallel=True)
def in_range(x, n_rows, n_in):
    """Return rows that are contiguous, and no factors, if all rows may be multiplied as they are.

    Otherwise return a copy that may be multiplied, and for each row the factor by which its sums must be multiplied.

    Args:
        x: of float32, or of bfloat16 as uint16.
        n_in: how many numbers a row has, a multiple of 32.
    """
    exponents = np.empty(n_rows, np.int64)
    if n_rows <= _MOST_ALONE:
        for t in range(n_rows):
            exponents[t] = _exponent(x, t * n_in, n_in // GROUP)
    else:
        for t in prange(n_rows):
            exponents[t] = _exponent(x, t * n_in, n_in // GROUP)
    n_out = 0
    for t in range(n_rows):
        n_out += abs(exponents[t] - _BIAS) > _REACH
    if n_out == 0:
        return x, np.empty(0, np.float32)
    moved, factors = np.empty_like(x), np.empty(n_rows, np.float32)
    for t in range(n_rows):
        power = _ONE
        if exponents[t] > _BIAS + _REACH:
            power = _BACK
        elif exponents[t] < _BIAS - _REACH:
            power = _SHIFT
        factors[t] = _ONE / power
        for i in range(t * n_in, (t + 1) * n_in):
            put(moved, i, get(x, i) * power)
    return moved, factors


@subroutine()
def multiply_back(sums, first, n_rows, factors, t):
    """Multiply the sums of rows, 16 each from `first` on, by the rows' factors from `t` on, if there are factors."""
    if len(factors) > 0:
        for row in range(n_rows):
            for lane in range(first + row * BLOCK, first + (row + 1) * BLOCK):
                sums[lane] *= factors[t + row]
