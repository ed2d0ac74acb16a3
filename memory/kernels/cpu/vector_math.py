"""Computes exp2, exp and softplus of float32 scalars with code that LLVM can vectorize.

numba's `math.exp` calls a scalar library function, so a loop with it is not vectorized. These functions are polynomials
without branches, so a loop over channels becomes full-width SIMD. Tests check the accuracy: 2 ulp for `exp2_f32`, and 4
ulp for `softplus_f32`.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hybridmem.memory.kernels.cpu.rules import inlined

LOG2_E = np.float32(1.4426950408889634)
_LOWEST, _HIGHEST = np.float32(-126.0), np.float32(127.0)
# Adding 1.5 * 2**23 rounds to an integer and leaves that integer in the low bits of the sum.
_ROUNDER = np.float32(12582912.0)
_BITS_OF_ONE = np.int32(0x3F800000)
_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
EXP2 = tuple(
    np.float32(c) for c in (0.6931472056, 0.2402264846, 0.05550329035, 0.009618373251, 0.001339984829, 0.0001537070482)
)
"""Coefficients of 2**r - 1 = r * (c1 + c2 r + ...) on [-1/2, 1/2], by least squares of the relative error, 2.2e-9."""

# log(1 + u) = 2 atanh(u / (2 + u)) = 2 (s + s^3 / 3 + s^5 / 5 + ...), s <= 1/3
_ATANH = tuple(np.float32(1 / k) for k in (3, 5, 7, 9, 11, 13, 15))


@intrinsic
def float_from_bits(typing_context, bits):
    """Return the float32 with the same bits as an int32."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def _bits_from_float(typing_context, x):
    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@inlined
def exp2_f32(x):
    """Compute 2**x for float32, to 2 ulp within [-126, 127]. Other x are clamped to this range."""
    # It is written so that NaN stays NaN: every comparison with NaN is false.
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    shifted = x + _ROUNDER
    r = x - (shifted - _ROUNDER)
    p = EXP2[5]
    p = p * r + EXP2[4]
    p = p * r + EXP2[3]
    p = p * r + EXP2[2]
    p = p * r + EXP2[1]
    p = p * r + EXP2[0]
    p = p * r + _ONE
    # 2**n has n + 127 in the exponent's bits. Adding n to the exponent of p would save a product, but would turn some
    # NaN into numbers.
    return p * float_from_bits((_bits_from_float(shifted) << np.int32(23)) + _BITS_OF_ONE)  # type: ignore[call-arg]


@inlined
def exp_f32(x):
    """Compute e**x for float32. The rounded product with log2(e) gives a relative error up to |x| * 1.2e-7."""
    return exp2_f32(x * LOG2_E)


@inlined
def softplus_f32(x):
    """Compute log(1 + e**x) without overflow."""
    u = exp_f32(-abs(x))
    s = u / (_TWO + u)
    z = s * s
    p = _ATANH[6]
    p = p * z + _ATANH[5]
    p = p * z + _ATANH[4]
    p = p * z + _ATANH[3]
    p = p * z + _ATANH[2]
    p = p * z + _ATANH[1]
    p = p * z + _ATANH[0]
    p = p * z + _ONE
    return max(x, _ZERO) + _TWO * s * p


@intrinsic
def prefetch(typing_context, array, index):
    """Prefetch the cache line of array[index], of a contiguous array, without waiting for it."""

    def codegen(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        # The numbers mean: a prefetch for reading, into all caches, of data.
        builder.call(function, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, index), codegen
