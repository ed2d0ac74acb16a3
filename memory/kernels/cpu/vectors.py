"""Defines operations on vectors of sixteen float32, for loops that must sum in a fixed order on the CPU.

Vectors are loaded from arrays of float32, or of 16-bit floats (see `numbers`), which become float32 when loaded.

LLVM chooses the order of sums in loops that it vectorizes, and it does not vectorize a loop over several rows that
share operands. These operations compile to full vectors on any machine (one register with AVX-512, two with AVX2, four
with NEON), and round in the same way on all of them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from hybridmem.memory.kernels.cpu.numbers import as_float, untyped_intrinsic
from hybridmem.memory.kernels.eight_bits import MIX_ELEMENT

LANES = 16
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_INDEX = ir.IntType(32)
_CODES = ir.VectorType(_INDEX, LANES)


class _Float32x16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


_float32x16 = _Float32x16()


@register_model(_Float32x16)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Any) -> None:
        super().__init__(manager, type_, _VECTOR)


@untyped_intrinsic
def load(typing_context, array, at):
    """Load array[at : at + 16] of a contiguous array of floats, as float32. `at` is not checked."""

    def codegen(context, builder, signature, arguments):
        element = context.get_data_type(array.dtype)
        pointer = _pointer(context, builder, signature, arguments, ir.VectorType(element, LANES))
        return as_float(builder, array.dtype, builder.load(pointer, align=array.dtype.bitwidth // 8))

    return _float32x16(array, at), codegen


@untyped_intrinsic
def store(typing_context, array, at, x):
    """Store array[at : at + 16] = x. `at` is not checked."""

    def codegen(context, builder, signature, arguments):
        builder.store(arguments[2], _pointer(context, builder, signature, arguments), align=4)
        return context.get_dummy_value()

    return types.void(array, at, x), codegen


@untyped_intrinsic
def splat(typing_context, x):
    """Return a vector with x in every lane."""

    def codegen(context, builder, signature, arguments):
        return _in_every_lane(builder, arguments[0])

    return _float32x16(types.float32), codegen


@untyped_intrinsic
def load_codes(typing_context, array, at, shift, mask):
    """Load (array[at : at + 16] >> shift) & mask of a contiguous uint8 array, as float32. `at` is not checked.

    `shift` and `mask` are int32.
    """

    def codegen(context, builder, signature, arguments):
        shift, mask = (_in_every_lane(builder, x) for x in arguments[2:])
        return builder.uitofp(
            builder.and_(builder.lshr(_bytes(context, builder, signature, arguments), shift), mask), _VECTOR
        )

    return _float32x16(array, at, types.int32, types.int32), codegen


@untyped_intrinsic
def load_float8(typing_context, array, at):
    """Load the float8 e4m3 numbers array[at : at + 16] of a contiguous uint8 array, as float32. `at` is not checked."""

    def codegen(context, builder, signature, arguments):
        return _of_float8(builder, _bytes(context, builder, signature, arguments))

    return _float32x16(array, at), codegen


@untyped_intrinsic
def load_8_bits(typing_context, array, at):
    """Load array[at : at + 16] of a contiguous array of int8, or of uint8 that hold float8 e4m3, as float32."""

    def codegen(context, builder, signature, arguments):
        codes = _bytes(context, builder, signature, arguments)
        if array.dtype == types.uint8:
            return _of_float8(builder, codes)
        return builder.sitofp(builder.sext(builder.trunc(codes, ir.VectorType(ir.IntType(8), LANES)), _CODES), _VECTOR)

    return _float32x16(array, at), codegen


@untyped_intrinsic
def store_8_bits(typing_context, array, at, x, chance):
    """Store array[at : at + 16] = x as codes of 8 bits: int8, or float8 e4m3 in an array of uint8.

    `chance` is a uint32: how a number between two codes is rounded follows from it, as in `memory.kernels.eight_bits`.
    It grows by `MIX_ELEMENT` from lane to lane. NaN becomes 0. `at` is not checked.
    """

    def codegen(context, builder, signature, arguments):
        x, chance = arguments[2:]
        steps = ir.Constant(_CODES, [lane * MIX_ELEMENT & 0xFFFFFFFF for lane in range(LANES)])
        chances = builder.add(_in_every_lane(builder, chance), steps)
        x = builder.select(builder.fcmp_ordered("ord", x, x), x, ir.Constant(_VECTOR, [0.0] * LANES))
        codes = (_to_float8 if array.dtype == types.uint8 else _to_int8)(builder, x, chances)
        codes = builder.trunc(codes, ir.VectorType(ir.IntType(8), LANES))
        builder.store(codes, _pointer(context, builder, signature, arguments, codes.type), align=1)
        return context.get_dummy_value()

    return types.void(array, at, x, types.uint32), codegen


@untyped_intrinsic
def larger_size(typing_context, x, sizes):
    """Return the larger of |x| and `sizes`, lane by lane. NaN is larger than all numbers."""

    def codegen(context, builder, signature, arguments):
        x, sizes = (builder.bitcast(each, _CODES) for each in arguments)
        x = builder.and_(x, ir.Constant(_CODES, [0x7FFFFFFF] * LANES))
        return builder.bitcast(builder.select(builder.icmp_signed(">", x, sizes), x, sizes), _VECTOR)

    return _float32x16(x, sizes), codegen


@untyped_intrinsic
def largest_of(typing_context, sizes):
    """Return the largest lane of what `larger_size` returned."""

    def codegen(context, builder, signature, arguments):
        x = builder.bitcast(arguments[0], _CODES)
        while x.type.count > 1:
            half = x.type.count // 2
            low, high = (_shuffle(builder, x, x, list(range(first, first + half))) for first in (0, half))
            x = builder.select(builder.icmp_signed(">", low, high), low, high)
        return builder.bitcast(builder.extract_element(x, _INDEX(0)), ir.FloatType())

    return types.float32(sizes), codegen


@untyped_intrinsic
def higher(typing_context, x, y):
    """Return the higher of x and y, lane by lane. Where y is NaN, x is returned."""

    def codegen(context, builder, signature, arguments):
        return _higher(builder, *arguments)

    return _float32x16(x, y), codegen


@untyped_intrinsic
def highest_of(typing_context, x):
    """Return the highest lane of x, which has no NaN."""

    def codegen(context, builder, signature, arguments):
        x = arguments[0]
        while x.type.count > 1:
            half = x.type.count // 2
            x = _higher(builder, *(_shuffle(builder, x, x, list(range(first, first + half))) for first in (0, half)))
        return builder.extract_element(x, _INDEX(0))

    return types.float32(x), codegen


@untyped_intrinsic
def multiply(typing_context, x, y):
    def codegen(context, builder, signature, arguments):
        return builder.fmul(*arguments)

    return _float32x16(x, y), codegen


@untyped_intrinsic
def multiply_add(typing_context, x, y, z):
    """Return x * y + z, with one rounding."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), arguments)

    return _float32x16(x, y, z), codegen


@untyped_intrinsic
def total(typing_context, x):
    """Sum all lanes, by adding halves."""

    def codegen(context, builder, signature, arguments):
        return builder.extract_element(_halved(builder, arguments[0], 1), _INDEX(0))

    return types.float32(x), codegen


@untyped_intrinsic
def store_totals(typing_context, array, at, x0, x1, x2, x3):
    """Store the totals of four vectors in array[at : at + 4], with the same bits as `total` of each vector."""

    def codegen(context, builder, signature, arguments):
        x0, x1, x2, x3 = arguments[2:]
        sums = _halved(builder, _paired(builder, _paired(builder, x0, x1, 1), _paired(builder, x2, x3, 1), 2), 4)
        builder.store(sums, _pointer(context, builder, signature, arguments, sums.type), align=4)
        return context.get_dummy_value()

    return types.void(array, at, x0, x1, x2, x3), codegen


def _paired(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, n_parts: int) -> ir.Value:
    """Return a vector with the sums of the halves of each of the n parts of x, followed by those of y."""
    return _sum_of_halves(builder, x, y, 2 * n_parts, LANES // n_parts)


def _halved(builder: ir.IRBuilder, x: ir.Value, n_parts: int) -> ir.Value:
    """Sum each of the n parts of x into one lane."""
    while x.type.count > n_parts:
        x = _sum_of_halves(builder, x, ir.Constant(x.type, ir.Undefined), n_parts, x.type.count // n_parts)
    return x


def _sum_of_halves(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, n_parts: int, part: int) -> ir.Value:
    firsts = [part * p + lane for p in range(n_parts) for lane in range(part // 2)]
    return builder.fadd(_shuffle(builder, x, y, firsts), _shuffle(builder, x, y, [lane + part // 2 for lane in firsts]))


def _higher(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", y, x), y, x)


def _in_every_lane(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    undefined = ir.Constant(ir.VectorType(x.type, LANES), ir.Undefined)
    return _shuffle(builder, builder.insert_element(undefined, x, _INDEX(0)), undefined, [0] * LANES)


def _of_float8(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """Turn float8 e4m3 into float32.

    The exponents of float8 have a bias that is 120 less than that of float32. Numbers below 2**-6 have no leading one.
    If they are read with one, they are too large by 2**-6. (Moving the bits and multiplying by 2**120 would be shorter,
    but processors are slow for such small numbers.)
    """

    def every(number: int) -> ir.Value:
        return ir.Constant(_CODES, [number] * LANES)

    size = builder.shl(builder.and_(codes, every(0x7F)), every(20))
    large = builder.bitcast(builder.add(size, every(121 << 23)), _VECTOR)
    small = builder.bitcast(builder.fsub(large, ir.Constant(_VECTOR, [2.0**-6] * LANES)), _CODES)
    size = builder.select(builder.icmp_unsigned("<", size, every(1 << 23)), small, builder.add(size, every(120 << 23)))
    return builder.bitcast(builder.or_(size, builder.shl(builder.and_(codes, every(0x80)), every(24))), _VECTOR)


def _rounded_up_by(builder: ir.IRBuilder, x: ir.Value, chances: ir.Value) -> ir.Value:
    """Add a number of [0, 1) to x: the upper 24 of 32 bits."""
    upper = builder.lshr(chances, ir.Constant(_CODES, [8] * LANES))
    part = builder.fmul(builder.sitofp(upper, _VECTOR), ir.Constant(_VECTOR, [2.0**-24] * LANES))
    return builder.fadd(x, part)


def _to_int8(builder: ir.IRBuilder, x: ir.Value, chances: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_VECTOR, [_VECTOR])
    floor = cgutils.get_or_insert_function(builder.module, kind, f"llvm.floor.v{LANES}f32")
    x = builder.call(floor, [_rounded_up_by(builder, x, chances)])
    least, most = (ir.Constant(_VECTOR, [bound] * LANES) for bound in (-127.0, 127.0))
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    return builder.fptosi(builder.select(builder.fcmp_ordered(">", x, most), most, x), _CODES)


def _to_float8(builder: ir.IRBuilder, x: ir.Value, chances: ir.Value) -> ir.Value:
    """Round to float8. Below 2**-6 all steps are equal; above, the 20 lowest bits of a float32 are rounded away."""

    def every(number: int) -> ir.Value:
        return ir.Constant(_CODES, [number] * LANES)

    bits = builder.bitcast(x, _CODES)
    size = builder.and_(bits, every(0x7FFFFFFF))
    large = builder.lshr(builder.add(size, builder.lshr(chances, every(12))), every(20))
    steps = builder.fmul(builder.bitcast(size, _VECTOR), ir.Constant(_VECTOR, [512.0] * LANES))
    small = builder.fptosi(_rounded_up_by(builder, steps, chances), _CODES)
    is_small = builder.icmp_signed("<", size, every(121 << 23))
    code = builder.select(is_small, small, builder.sub(large, every(120 << 3)))
    code = builder.select(builder.icmp_signed(">", code, every(126)), every(126), code)
    return builder.or_(code, builder.and_(builder.lshr(bits, every(24)), every(0x80)))


def _bytes(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
    """Load sixteen bytes as int32."""
    pointer = _pointer(context, builder, signature, arguments, ir.VectorType(ir.IntType(8), LANES))
    return builder.zext(builder.load(pointer, align=1), _CODES)


def _shuffle(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, lanes: list[int]) -> ir.Value:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_INDEX, len(lanes)), lanes))


def _pointer(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any, type_: ir.Type = _VECTOR) -> ir.Value:
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.bitcast(builder.gep(data, [arguments[1]]), type_.as_pointer())
