"""Reads and writes 16-bit floats in compiled loops. numba has no type for them, so their arrays hold integers.

uint16 stands for bfloat16, the upper half of a float32, and int16 stands for float16. `get`, `put` and `move` work on
arrays of these and of any other type, so that the same source serves all dtypes: everything is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from hybridmem.memory.kernels.cpu.rules import inlined

_I16, _I32, _F16, _F32 = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
_QUIET_NAN = 0x7FC0
_SHORT = (types.uint16, types.int16)


def untyped_intrinsic(typing: Callable[..., Any]) -> Any:
    """Decorate with numba's `intrinsic`. Its own type annotation hides how the result may be called."""
    return intrinsic(typing)


def as_float(builder: ir.IRBuilder, dtype: Any, x: ir.Value) -> ir.Value:
    """Return the float32 for 16 bits, or for a vector of them. Other numbers are returned as they are."""
    if dtype not in _SHORT:
        return x

    def like(element: ir.Type) -> ir.Type:
        return ir.VectorType(element, x.type.count) if isinstance(x.type, ir.VectorType) else element

    if dtype == types.int16:
        return builder.fpext(builder.bitcast(x, like(_F16)), like(_F32))
    wide = builder.zext(x, like(_I32))
    sixteen = ir.Constant(wide.type, [16] * x.type.count) if isinstance(x.type, ir.VectorType) else _I32(16)
    return builder.bitcast(builder.shl(wide, sixteen), like(_F32))


def rounded(builder: ir.IRBuilder, dtype: Any, x: ir.Value) -> ir.Value:
    """Return the 16 bits nearest to a float32, or to each of a vector.

    Of two equally near numbers, the even one is returned. NaN stays NaN.
    """

    def like(element: ir.Type) -> ir.Type:
        return ir.VectorType(element, x.type.count) if isinstance(x.type, ir.VectorType) else element

    def every(element: ir.Type, number: int) -> ir.Constant:
        kind = like(element)
        return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)

    if dtype == types.int16:
        return builder.bitcast(builder.fptrunc(x, like(_F16)), like(_I16))
    bits = builder.bitcast(x, like(_I32))
    is_odd = builder.and_(builder.lshr(bits, every(_I32, 16)), every(_I32, 1))
    nearest = builder.lshr(builder.add(builder.add(bits, every(_I32, 0x7FFF)), is_odd), every(_I32, 16))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.select(is_nan, every(_I16, _QUIET_NAN), builder.trunc(nearest, like(_I16)))


def element_at(context: Any, builder: ir.IRBuilder, kind: Any, array: ir.Value, at: ir.Value) -> ir.Value:
    """Return a pointer to element `at` of an array of this numba type."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


def _stored(context: Any, builder: ir.IRBuilder, x: ir.Value, of: Any, dtype: Any) -> ir.Value:
    """Convert a number of type `of` to the type that an array of `dtype` holds."""
    if dtype in _SHORT:
        return rounded(builder, dtype, context.cast(builder, x, of, types.float32))
    return context.cast(builder, x, of, dtype)


@untyped_intrinsic
def get(typing_context, array, at):
    """Return array[at] of a contiguous array. A 16-bit float becomes float32. `at` is not checked."""

    def codegen(context, builder, signature, arguments):
        pointer = element_at(context, builder, array, *arguments)
        return as_float(builder, array.dtype, builder.load(pointer, align=array.dtype.bitwidth // 8))

    return (types.float32 if array.dtype in _SHORT else array.dtype)(array, at), codegen


@untyped_intrinsic
def put(typing_context, array, at, x):
    """Set array[at] = x in a contiguous array, rounded if the array holds 16-bit floats. `at` is not checked."""

    def codegen(context, builder, signature, arguments):
        value = _stored(context, builder, arguments[2], x, array.dtype)
        builder.store(value, element_at(context, builder, array, *arguments[:2]), align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, at, x), codegen


@untyped_intrinsic
def move(typing_context, target, source, at):
    """Set target[at] = source[at] in contiguous arrays. If both have one type, bits are copied. `at` is not checked."""

    def codegen(context, builder, signature, arguments):
        x = builder.load(element_at(context, builder, source, *arguments[1:]), align=source.dtype.bitwidth // 8)
        if target.dtype != source.dtype:
            of = types.float32 if source.dtype in _SHORT else source.dtype
            x = _stored(context, builder, as_float(builder, source.dtype, x), of, target.dtype)
        place = element_at(context, builder, target, arguments[0], arguments[2])
        builder.store(x, place, align=target.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(target, source, at), codegen


@untyped_intrinsic
def _pointer(typing_context, address, like):
    """Return an address as a pointer to numbers of the type that the array `like` holds."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), codegen


@inlined
def array_at(address, n, like):
    """Return n numbers at an address, of the type that `like` holds. The address is not checked.

    Passing a tensor's address takes a tenth of the time of passing an array, which matters for kernels on few rows.
    """
    return carray(_pointer(address, like), n)
