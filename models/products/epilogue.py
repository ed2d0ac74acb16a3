"""Emits the epilogue of products (bias, activation and rounding of their sums) in vectors of 16 outputs.

Every compiled product ends with it, so a row's result has the same bits whichever kernel computed its sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from hybridmem.memory.kernels.cpu.parts import EXP2, LOG2_E, element_at, rounded, untyped_intrinsic
from hybridmem.models.products.integer_vectors import (
    FLOATS,
    I16,
    I32,
    I64,
    INTS,
    PAIRS_OF_BFLOAT,
    call,
    in_every_lane,
    multiplies_pairs,
)
from hybridmem.models.weights.layouts import BLOCK

ACTIVATIONS = {None: 0, "silu": 1, "swish": 1, "relu": 2, "sigmoid": 3}
"""Maps transformers' names of the activations that products apply to their sums to numbers."""

FUSED, NO_BIAS = tuple(name for name in ACTIVATIONS if name is not None), np.empty(0, np.float32)

_SIGMOID, _RELU, _SILU = (I64(ACTIVATIONS[name]) for name in ("sigmoid", "relu", "silu"))
_LANES = ir.Constant(INTS, list(range(BLOCK)))


def epilogue_of(n_blocks: int) -> Any:
    """Return a function that writes the results of rows, for one block of outputs or for two adjacent blocks."""

    @untyped_intrinsic
    def epilogue(typing_context, sums, at, n_rows, bias, activation, channel, out, place, n_out):
        """Set n_rows of `out`, from `place` on, to activation(sums + bias) of outputs from `channel` on.

        Rows of sums lie one after the other from `at` on, 16 each, and those of the second block 256 further on. Rows
        of `out` have `n_out` numbers, float32, or uint16 and int16 for 16 bits. Outputs that they do not have are left
        out.
        """

        def codegen(context, builder, signature, arguments):
            first = element_at(context, builder, sums, arguments[0], arguments[1])
            rows = Rows(context, builder, signature, arguments, 3, (first, BLOCK * BLOCK, n_blocks))
            with cgutils.for_range(builder, arguments[2], intp=I64) as loop:
                rows.write(loop.index)
            return context.get_dummy_value()

        at = types.int64
        return types.void(sums, at, at, bias, at, at, out, at, at), codegen

    return epilogue


class Rows:
    """Emits the results of single rows.

    Args:
        first: the index of the argument `bias`. The arguments activation, first output, `out`, its place and its number
            of outputs follow, as for `epilogue`.
        sums: where the sums begin, how far apart those of two blocks are, and the number of blocks.
    """

    def __init__(
        self, context: Any, b: ir.IRBuilder, signature: Any, arguments: Any, first: int, sums: tuple[ir.Value, int, int]
    ) -> None:
        self._b, self._out_type = b, signature.args[first + 3].dtype
        bias, self._activation, channel, _, place, self._n_out = arguments[first : first + 6]
        self._sums, self._block_sums, n_blocks = sums
        self._out = element_at(context, b, signature.args[first + 3], arguments[first + 3], place)
        n_left = b.trunc(b.sub(self._n_out, channel), I32)
        array = context.make_array(signature.args[first])(context, b, bias)
        has_bias = in_every_lane(b, b.icmp_signed(">", b.extract_value(array.shape, 0), I64(0)))
        self._is_there, self._bias = [], []
        for v in range(n_blocks):
            is_there = b.icmp_signed("<", _LANES, in_every_lane(b, b.sub(n_left, I32(BLOCK * v))))
            at = b.bitcast(b.gep(array.data, [b.add(channel, I64(BLOCK * v))]), FLOATS.as_pointer())
            mask = b.and_(is_there, has_bias)
            self._bias.append(call(b, "llvm.masked.load.v16f32.p0", FLOATS, at, I32(4), mask, _all(0)))
            self._is_there.append(is_there)

    def write(self, row: ir.Value) -> None:
        """Emit one row: activation(sums + bias), rounded to the type of `out`."""
        b, found = self._b, []
        for v, bias in enumerate(self._bias):
            at = b.gep(self._sums, [b.add(b.mul(row, I64(BLOCK)), I64(self._block_sums * v))])
            sums = b.load(b.bitcast(at, FLOATS.as_pointer()), align=4)
            found.append(b.fadd(sums, bias))
        found = self._activated(found)
        out = b.gep(self._out, [b.mul(row, self._n_out)])
        if self._out_type == types.uint16 and len(found) == 2 and multiplies_pairs():
            self._store_pairs(found, out)
            return
        for v, (values, mask) in enumerate(zip(found, self._is_there, strict=True)):
            self._store(values, mask, b.gep(out, [I64(BLOCK * v)]))

    def _activated(self, sums: list[ir.Value]) -> list[ir.Value]:
        """Return activation(sums). A single division serves silu, x / (1 + exp(-x)), and sigmoid."""
        b = self._b
        divides, others, end = (b.append_basic_block(name) for name in ("divides", "others", "activated"))
        switch = b.switch(self._activation, others)
        switch.add_case(_SILU, divides)
        switch.add_case(_SIGMOID, divides)
        b.position_at_end(divides)
        is_silu = b.icmp_signed("==", self._activation, _SILU)
        one = _all(1)
        quotients = [b.fdiv(b.select(is_silu, x, one), b.fadd(one, _exp2(b, b.fmul(x, _all(-LOG2_E))))) for x in sums]
        b.branch(end)
        b.position_at_end(others)
        is_relu, zero = b.icmp_signed("==", self._activation, _RELU), _all(0)
        cut = [b.select(b.and_(in_every_lane(b, is_relu), b.fcmp_ordered("<", x, zero)), zero, x) for x in sums]
        b.branch(end)
        b.position_at_end(end)
        found = []
        for quotient, other in zip(quotients, cut, strict=True):
            phi = b.phi(FLOATS)
            phi.add_incoming(quotient, divides)
            phi.add_incoming(other, others)
            found.append(phi)
        return found

    def _store_pairs(self, found: list[ir.Value], out: ir.Value) -> None:
        b = self._b
        shorts = ir.VectorType(I16, 2 * BLOCK)
        both = b.bitcast(call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS_OF_BFLOAT, found[1], found[0]), shorts)
        order = ir.Constant(ir.VectorType(I32, 2 * BLOCK), list(range(2 * BLOCK)))
        mask = b.shuffle_vector(*self._is_there, order)
        call(b, "llvm.masked.store.v32i16.p0", ir.VoidType(), both, b.bitcast(out, shorts.as_pointer()), I32(2), mask)

    def _store(self, values: ir.Value, mask: ir.Value, out: ir.Value) -> None:
        b, kind, name, size = self._b, FLOATS, "llvm.masked.store.v16f32.p0", 4
        if self._out_type != types.float32:
            kind, name, size = ir.VectorType(I16, BLOCK), "llvm.masked.store.v16i16.p0", 2
            if self._out_type == types.uint16 and multiplies_pairs():
                short = ir.VectorType(PAIRS_OF_BFLOAT.element, BLOCK)
                values = b.bitcast(call(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", short, values), kind)
            else:
                values = rounded(b, self._out_type, values)
        call(b, name, ir.VoidType(), values, b.bitcast(out, kind.as_pointer()), I32(size), mask)


def _exp2(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return 2**x of a vector, computed as `vector_math.exp2_f32` does; NaN stays NaN."""
    lowest, highest, rounder = _all(-126.0), _all(127.0), _all(12582912.0)
    x = b.select(b.fcmp_ordered("<", x, lowest), lowest, x)
    x = b.select(b.fcmp_ordered(">", x, highest), highest, x)
    shifted = b.fadd(x, rounder)
    r = b.fsub(x, b.fsub(shifted, rounder))
    p = _all(EXP2[-1])
    for c in (*EXP2[-2::-1], 1.0):
        p = call(b, f"llvm.fma.v{BLOCK}f32", FLOATS, p, r, _all(c))
    exponent = b.shl(b.bitcast(shifted, INTS), ir.Constant(INTS, [23] * BLOCK))
    power = b.add(exponent, ir.Constant(INTS, [0x3F800000] * BLOCK))
    return b.fmul(p, b.bitcast(power, FLOATS))


def _all(number: Any) -> ir.Constant:
    return ir.Constant(FLOATS, [float(number)] * BLOCK)


block_epilogue, two_block_epilogue = epilogue_of(1), epilogue_of(2)
