"""Compiles the rounding of weights to integers of 8 and 4 bits, for the CPU.

With 8 bits, the scale is a group's largest weight / 127. With 4 bits, several scales are tried, and the one with the
least squared error is taken; then the scale is replaced by the best one for the resulting integers. Sixteen outputs are
rounded side by side, in the lanes of vectors, so their sums have the same order on every processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types

from hybridmem.memory.kernels.cpu.parts import as_float, compiled, element_at, get, put, subroutine, untyped_intrinsic
from hybridmem.models.products.amx import I64
from hybridmem.models.products.integer_vectors import FLOATS, I8, I16, INTS, ROUNDER, ZEROS, call, every
from hybridmem.models.weights.layouts import BLOCK, GROUP

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)

_LEAST_SCALE = np.float32(2.0**-126)
"""Weights with smaller scales, which are denormal, count as zeros."""

_DIVISORS = 7.0, 7.25, 7.5, 7.75, 8.0, 8.25, 8.5, 9.0
"""The quotients of a group's largest weight and its scale that are tried for 4 bits."""

_RANGES = {8: (-127.0, 127.0), 4: (-8.0, 7.0)}
"""The least and the largest integer of 8 and of 4 bits."""


def _floats(x: float) -> ir.Constant:
    return ir.Constant(FLOATS, [x] * BLOCK)


def _nearest(b: ir.IRBuilder, x: ir.Value, n_bits: int) -> ir.Value:
    """Return the integers in range that are nearest to x."""
    least, most = map(_floats, _RANGES[n_bits])
    x = b.select(b.fcmp_ordered("<", x, least), least, x)
    x = b.select(b.fcmp_ordered(">", x, most), most, x)
    return b.fsub(b.fadd(x, ROUNDER), ROUNDER)


def transposed(b: ir.IRBuilder, vectors: list[ir.Value]) -> list[ir.Value]:
    """Return sixteen vectors: vector i has lane i of all given vectors. Ever smaller squares are exchanged."""
    step = BLOCK // 2
    while step:
        low, high = (
            ir.Constant(INTS, [lane - (lane & step) + own + (BLOCK if lane & step else 0) for lane in range(BLOCK)])
            for own in (0, step)
        )
        for i in range(BLOCK):
            if not i & step:
                both = vectors[i], vectors[i + step]
                vectors[i], vectors[i + step] = b.shuffle_vector(*both, low), b.shuffle_vector(*both, high)
        step //= 2
    return vectors


@untyped_intrinsic
def _read(typing_context, weight, first, n_in, group):
    """Set group[16 i + lane] to input i of sixteen outputs, which have n_in weights each from `first` on.

    Nothing is checked.
    """

    def codegen(context, builder, signature, arguments):
        b, n_bytes = builder, weight.dtype.bitwidth // 8
        source = b.bitcast(element_at(context, b, weight, arguments[0], arguments[1]), I8.as_pointer())
        target = element_at(context, b, group, arguments[3], I64(0))
        rows = [b.gep(source, [b.mul(arguments[2], I64(n_bytes * lane))]) for lane in range(BLOCK)]
        # Each part has 64 bytes: sixteen numbers of 32 bits, or sixteen pairs of 16 bits.
        for part in range(n_bytes // 2):
            places = (b.bitcast(b.gep(row, [I64(64 * part)]), INTS.as_pointer()) for row in rows)
            for i, x in enumerate(transposed(b, [b.load(place, align=n_bytes) for place in places])):
                if n_bytes == 4:
                    numbers = [b.bitcast(x, FLOATS)]
                else:
                    halves = (x, b.lshr(x, every(16)))
                    numbers = [as_float(b, weight.dtype, b.trunc(own, ir.VectorType(I16, BLOCK))) for own in halves]
                for k, own in enumerate(numbers):
                    place = b.gep(target, [I64(BLOCK * ((BLOCK * part + i) * len(numbers) + k))])
                    b.store(own, b.bitcast(place, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(weight, types.int64, types.int64, group), codegen


def _vectors(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> list[ir.Value]:
    """Return a pointer to the first sixteen numbers of each array, as a vector."""
    pointers = (element_at(context, b, *pair, I64(0)) for pair in zip(signature.args, arguments, strict=True))
    return [b.bitcast(pointer, FLOATS.as_pointer()) for pointer in pointers]


@untyped_intrinsic
def _find_largest(typing_context, group, largest, spoilt):
    """Find the weight with the largest size of each output. Make `spoilt` NaN if a weight is NaN or infinite.

    Before the call, both arrays hold what was found in earlier groups.
    """

    def codegen(context, builder, signature, arguments):
        b = builder
        source, largest_at, spoilt_at = _vectors(context, b, signature, arguments)
        most, sums = b.load(largest_at, align=4), b.load(spoilt_at, align=4)
        for i in range(GROUP):
            x = b.load(b.gep(source, [I64(i)]), align=4)
            sizes = (call(b, "llvm.fabs.v16f32", FLOATS, own) for own in (x, most))
            most = b.select(b.fcmp_ordered(">", *sizes), x, most)
            sums = b.fadd(sums, b.fmul(x, ZEROS))
        b.store(most, largest_at, align=4)
        b.store(sums, spoilt_at, align=4)
        return context.get_dummy_value()

    return types.void(group, largest, spoilt), codegen


def _power_of_two(b: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the power of two of each lane's size, limited so that its inverse is not denormal, and this inverse."""
    exponent = b.and_(b.lshr(b.bitcast(x, INTS), every(23)), every(0xFF))
    for sign, end in (("<", every(1)), (">", every(253))):
        exponent = b.select(b.icmp_unsigned(sign, exponent, end), end, exponent)
    powers = (b.bitcast(b.shl(own, every(23)), FLOATS) for own in (exponent, b.sub(every(254), exponent)))
    return next(powers), next(powers)


@untyped_intrinsic
def _search_scale(typing_context, group, largest, scale):
    """Find the scale of each output for 4 bits: of those from `_DIVISORS` the one with the least squared error.

    Weights are measured in units of the largest one's power of two, because squares of very small ones would be zero.
    """

    def codegen(context, builder, signature, arguments):
        b = builder
        source, largest_at, scale_at = _vectors(context, b, signature, arguments)
        unit, inverse = _power_of_two(b, most := b.load(largest_at, align=4))
        numbers = [b.fmul(b.load(b.gep(source, [I64(i)]), align=4), inverse) for i in range(GROUP)]
        most, best, found = b.fmul(most, inverse), ZEROS, ZEROS
        for divisor in _DIVISORS:
            factor = b.select(b.fcmp_ordered("==", most, ZEROS), ZEROS, b.fdiv(_floats(-divisor), most))
            products, squares = ZEROS, ZEROS
            for x in numbers:
                integer = _nearest(b, b.fmul(x, factor), 4)
                products = b.fadd(products, b.fmul(x, integer))
                squares = b.fadd(squares, b.fmul(integer, integer))
            gain = b.fdiv(b.fmul(products, products), squares)
            # The comparison is false if all weights are zero, because gain is then NaN.
            is_better = b.fcmp_ordered(">", gain, best)
            best, found = (
                b.select(is_better, new, old) for new, old in ((gain, best), (b.fdiv(products, squares), found))
            )
        b.store(b.fmul(found, unit), scale_at, align=4)
        return context.get_dummy_value()

    return types.void(group, largest, scale), codegen


def _writer(n_bits: int) -> Any:
    @untyped_intrinsic
    def write(typing_context, group, factor, codes, first):
        """Write the integers nearest to x * factor as codes, from `first` on, in the layout of `integer_vectors`."""

        def codegen(context, builder, signature, arguments):
            b = builder
            source, factor_at = _vectors(context, b, types.void(group, factor), arguments[:2])
            target, own = element_at(context, b, codes, arguments[2], arguments[3]), b.load(factor_at, align=4)

            def code(i: int) -> ir.Value:
                x = b.load(b.gep(source, [I64(i)]), align=4)
                integer = b.fptosi(_nearest(b, b.fmul(x, own), n_bits), INTS)
                return b.add(integer, every(8)) if n_bits == 4 else b.and_(integer, every(0xFF))

            if n_bits == 8:
                for i in range(0, GROUP, 2):
                    pairs = b.or_(code(i), b.shl(code(i + 1), every(8)))
                    place = b.bitcast(b.gep(target, [I64(BLOCK * i)]), ir.VectorType(I16, BLOCK).as_pointer())
                    b.store(b.trunc(pairs, ir.VectorType(I16, BLOCK)), place, align=1)
            else:
                for quarter in range(4):
                    word = every(0)
                    for i in range(8):
                        shift = 4 * (i // 2) + 16 * (i % 2)
                        word = b.or_(word, b.shl(code(8 * quarter + i), every(shift)))
                    place = b.gep(target, [I64(4 * BLOCK * quarter)])
                    b.store(word, b.bitcast(place, INTS.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(group, factor, codes, types.int64), codegen

    return write


_write_8, _write_4 = _writer(8), _writer(4)


@compiled(parallel=True)
def round_to_codes(weight, n_out, n_in, n_bits, n_parts, codes, scales):
    """Fill codes (uint8) and scales from a flat weight of float32 or 16 bits.

    What is beyond the weight's edges is zero.

    There are 16 scales for each group of a block, or for each block. The latter is possible only with 8 bits.
    """
    n_blocks, n_groups = (n_out + BLOCK - 1) // BLOCK, (n_in + GROUP - 1) // GROUP
    is_by_row = len(scales) == n_blocks * BLOCK
    for part in prange(n_parts):
        group, scale = np.empty(GROUP * BLOCK, np.float32), np.empty(BLOCK, np.float32)
        largest, spoilt = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        for o in range(part * n_blocks // n_parts, (part + 1) * n_blocks // n_parts):
            largest[:], spoilt[:] = _ZERO, _ZERO
            if is_by_row:
                for g in range(n_groups):
                    _fill(weight, n_out, n_in, o * BLOCK, g * GROUP, group)
                    _find_largest(group, largest, spoilt)
            for g in range(n_groups):
                _fill(weight, n_out, n_in, o * BLOCK, g * GROUP, group)
                if not is_by_row:
                    largest[:], spoilt[:] = _ZERO, _ZERO
                    _find_largest(group, largest, spoilt)
                _choose_scale(group, largest, spoilt, n_bits, scale)
                first = (o * n_groups + g) * BLOCK
                at = o * BLOCK if is_by_row else first
                for lane in range(BLOCK):
                    is_denormal = abs(scale[lane]) < _LEAST_SCALE
                    put(scales, at + lane, _ZERO if is_denormal else scale[lane])
                    scale[lane] = get(scales, at + lane)
                    scale[lane] = _ONE / scale[lane] if scale[lane] != _ZERO else _ZERO
                if n_bits == 8:
                    _write_8(group, scale, codes, first * GROUP)
                else:
                    _write_4(group, scale, codes, first * GROUP // 2)


@subroutine()
def _fill(weight, n_out, n_in, first_output, first_input, group):
    """Set group[16 * input + lane] to a block's weights."""
    if first_output + BLOCK <= n_out and first_input + GROUP <= n_in:
        _read(weight, first_output * n_in + first_input, n_in, group)
        return
    group[:] = _ZERO
    for lane in range(min(BLOCK, n_out - first_output)):
        at = (first_output + lane) * n_in + first_input
        for e in range(min(GROUP, n_in - first_input)):
            group[e * BLOCK + lane] = get(weight, at + e)


@subroutine()
def _choose_scale(group, largest, spoilt, n_bits, scale):
    """Set the scale of each lane, or NaN if a weight of the lane is NaN or infinite."""
    if n_bits == 8:
        for lane in range(BLOCK):
            scale[lane] = largest[lane] / np.float32(127.0)
    else:
        _search_scale(group, largest, scale)
    for lane in range(BLOCK):
        scale[lane] += spoilt[lane]
