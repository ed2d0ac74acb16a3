"""Rounds rows of bfloat16 so that their products with weights of 8 and 4 bits have exact sums.

In each group of 32 inputs, numbers become multiples of a power of two, the group's unit, which is 2**-11 of the power
of two of the group's largest number. Numbers within an eighth of the largest stay as they are. Others lose the bits
below the unit, and stay bfloat16. So a number is an integer below 4096 times its unit, and a weight is an integer of at
most 127. A group's sum is below 2**24 units, and so exact in 32 bits, also in float32, and in any order.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from hybridmem.memory.kernels.cpu.parts import subroutine, untyped_intrinsic
from hybridmem.models.products import amx
from hybridmem.models.products.amx import I64
from hybridmem.models.products.integer_vectors import (
    F32,
    FLOATS,
    I16,
    I32,
    INTS,
    ROUNDER,
    call,
    every,
    in_every_lane,
)
from hybridmem.models.products.tile_kernels import repeat
from hybridmem.models.weights.layouts import BLOCK, GROUP, PAIRS

_LEAST, _MOST = 12, 241
"""The biased exponents (bias 127) of a group's largest number for which its sums are neither denormal nor infinite.

Groups of smaller numbers count as zeros, because their row has far larger numbers (`row_ranges`). Groups with infinity
or NaN give NaN.
"""

_WORDS = ir.VectorType(I16, 2 * BLOCK)
_HALVES = [list(range(half * BLOCK, (half + 1) * BLOCK)) for half in range(2)]


class _Rounded:
    """Emits the 32 numbers of a group, in bfloat16, as integers times the group's unit.

    Attributes:
        integers: two vectors of float32.
        unit: float32. It is 0 if numbers are so small that sums would be denormal, and NaN if a number is infinite or
            NaN.
    """

    def __init__(self, b: ir.IRBuilder, numbers: ir.Value) -> None:
        self.b = b
        bits = b.load(b.bitcast(numbers, _WORDS.as_pointer()), align=2)
        sizes = b.and_(bits, ir.Constant(_WORDS, [0x7FFF] * 2 * BLOCK))
        largest = call(b, "llvm.vector.reduce.umax.v32i16", I16, sizes)
        exponent = b.lshr(b.zext(largest, I32), I32(7))
        is_zero, is_large = (b.icmp_unsigned(sign, exponent, I32(e)) for sign, e in (("<", _LEAST), (">", _MOST)))
        self._is_number = b.not_(b.or_(is_zero, is_large))
        power = b.bitcast(b.shl(b.sub(exponent, I32(11)), I32(23)), F32)
        self.unit = b.select(is_large, F32(float("nan")), b.select(is_zero, F32(0.0), power))
        inverse = b.bitcast(b.shl(b.sub(I32(265), exponent), I32(23)), F32)
        factor = in_every_lane(b, b.select(self._is_number, inverse, F32(0.0)))
        self.integers = list[ir.Value]()
        for half in _HALVES:
            own = b.zext(b.shuffle_vector(bits, bits, ir.Constant(INTS, half)), INTS)
            x = b.bitcast(b.shl(own, every(16)), FLOATS)
            self.integers.append(b.fsub(b.fadd(b.fmul(x, factor), ROUNDER), ROUNDER))

    def as_words(self) -> ir.Value:
        """Return the integers with 16 bits each. They are all 0 if the unit is 0 or NaN."""
        b = self.b
        ints = [b.trunc(b.fptosi(half, INTS), ir.VectorType(I16, BLOCK)) for half in self.integers]
        every = in_every_lane(b, self._is_number, 2 * BLOCK)
        return b.select(every, self._joined(*ints), ir.Constant(_WORDS, [0] * 2 * BLOCK))

    def as_bfloats(self) -> ir.Value:
        """Return the bits of the integers times the unit, in bfloat16, which is exact."""
        b, unit = self.b, in_every_lane(self.b, self.unit)
        bits = (b.lshr(b.bitcast(b.fmul(x, unit), INTS), every(16)) for x in self.integers)
        return self._joined(*(b.trunc(own, ir.VectorType(I16, BLOCK)) for own in bits))

    def _joined(self, first: ir.Value, second: ir.Value) -> ir.Value:
        return self.b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, 2 * BLOCK), list(range(2 * BLOCK))))


@untyped_intrinsic
def _to_integers(typing_context, x, n_groups, integers, units, sums):
    """Set integers, units and sums of groups of bfloat16; see `as_integers`. Nothing is checked."""

    def codegen(context, builder, signature, arguments):
        b = builder
        source, target, units, sums = (
            b.bitcast(amx.pointer(context, b, signature, arguments, i, I64(0)), element.as_pointer())
            for i, element in ((0, I16), (2, I16), (3, F32), (4, I32))
        )

        def write(group: ir.Value) -> None:
            first = b.mul(group, I64(GROUP))
            rounded = _Rounded(b, b.gep(source, [first]))
            words = rounded.as_words()
            b.store(words, b.bitcast(b.gep(target, [first]), _WORDS.as_pointer()), align=2)
            b.store(rounded.unit, b.gep(units, [group]), align=4)
            every = b.sext(words, ir.VectorType(I32, 2 * BLOCK))
            for half, lanes in enumerate(_HALVES):
                own = b.shuffle_vector(every, every, ir.Constant(INTS, lanes))
                total = call(b, "llvm.vector.reduce.add.v16i32", I32, own)
                b.store(total, b.gep(sums, [b.add(b.mul(group, I64(2)), I64(half))]), align=4)

        repeat(b, arguments[1], write)
        return context.get_dummy_value()

    return types.void(x, types.int64, integers, units, sums), codegen


@untyped_intrinsic
def in_units(typing_context, x, first, n_groups, rounded):
    """Set `rounded`, from `first` on, to bfloat16 of x, with each group rounded to its unit. Nothing is checked."""

    def codegen(context, builder, signature, arguments):
        b = builder
        source, target = (
            b.bitcast(amx.pointer(context, b, signature, arguments, i, arguments[1]), I16.as_pointer()) for i in (0, 3)
        )

        def write(group: ir.Value) -> None:
            first = b.mul(group, I64(GROUP))
            own = _Rounded(b, b.gep(source, [first])).as_bfloats()
            b.store(own, b.bitcast(b.gep(target, [first]), _WORDS.as_pointer()), align=2)

        repeat(b, arguments[2], write)
        return context.get_dummy_value()

    at = types.int64
    return types.void(x, at, at, rounded), codegen


@subroutine()
def as_integers(pairs):
    """Return rows as integers (int16), the units of their groups, and the sums of each half of a group's integers.

    A code is greater than its weight by the code of zero, or a weight is greater by a minimum. These sums correct for
    that, so that codes can be multiplied as they are.

    Args:
        pairs: pairs of bfloat16. Rows have a multiple of 32 inputs. There is at least one row.
    """
    n_groups = len(pairs) // PAIRS
    integers = np.empty(2 * len(pairs), np.int16)
    units, sums = np.empty(n_groups, np.float32), np.empty(2 * n_groups, np.int32)
    _to_integers(pairs, n_groups, integers, units, sums)
    return integers, units, sums
