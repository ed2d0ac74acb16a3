"""Emits instructions of AMX, a unit of some processors that multiplies small matrices, and detects the unit.

Linux gives AMX to a process that asks for it (arch_prctl, ARCH_REQ_XCOMP_PERM). Then all threads and children of the
process may use it. The registers of a thread are saved when the thread is interrupted. Kernels configure and empty the
registers within one part of a parallel loop, so nothing is left to other code of the thread, such as oneDNN's.

AMX has eight registers. Each holds a tile of up to 16 rows of 64 bytes: 16 x 32 bfloat16 of the rows, 32 x 16 of the
weights, as pairs, or 16 x 16 float32 of the sums. One instruction adds the product of two tiles to a third (Intel,
Architecture Instruction Set Extensions, chapter 3: TDPBF16PS). Here registers 0 to 3 hold sums, 4 and 5 rows, and 6 and
7 weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from hybridmem.memory.kernels.cpu.parts import element_at, subroutine, untyped_intrinsic

ROWS = 16
"""The most rows of a tile."""

TILE_BYTES = 1024
_LINE_BYTES = 64
ROWS_AT, WEIGHTS_AT = 4, 6
"""The first register for rows, and for weights."""

_I8, _I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


@cache
def multiplies_tiles() -> bool:
    """True if compiled code may use AMX for bfloat16. Linux is asked for it once in a process.

    It may not if numba is told to do without AMX (NUMBA_CPU_FEATURES).
    """
    features = str(cpu_target.target_context.codegen().magic_tuple())
    wanted = ("+amx-tile", "+amx-bf16", "+avx512bf16", "+avx512bw", "+avx512vnni")
    return all(feature in features for feature in wanted) and bool(torch.cpu._init_amx())


def _shapes() -> list[np.ndarray]:
    """Return the configurations of the registers for 0 ... 16 rows, 64 bytes each, as `ldtilecfg` reads them."""
    found = np.zeros((ROWS + 1, 64), np.uint8)
    found[:, 0] = 1  # There is only one palette.
    found[:, 16:32].view(np.uint16)[:] = _LINE_BYTES
    found[:, 48 : WEIGHTS_AT + 48] = np.arange(ROWS + 1)[:, None]
    found[:, WEIGHTS_AT + 48 : 56] = ROWS
    return list(found)


_SHAPES = _shapes()


def shape(n_rows: int) -> np.ndarray:
    """Return the configuration of the registers for a product of this many rows, at least one."""
    return _SHAPES[min(n_rows, ROWS)]


@untyped_intrinsic
def configure(typing_context, shape):
    """Configure this thread's registers with the result of `shape`."""

    def codegen(context, builder, signature, arguments):
        _call(builder, "ldtilecfg", pointer(context, builder, signature, arguments, 0, I64(0)))
        return context.get_dummy_value()

    return types.void(shape), codegen


@untyped_intrinsic
def release(typing_context):
    """Empty this thread's registers, because each switch of threads saves 8 KiB while they are in use."""

    def codegen(context, builder, signature, arguments):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


def zero(builder: ir.IRBuilder, tile: int) -> None:
    _call(builder, "tilezero", _I8(tile))


def load(builder: ir.IRBuilder, tile: int, at: ir.Value, stride_bytes: ir.Value) -> None:
    _call(builder, "tileloadd64", _I8(tile), at, stride_bytes)


def store(builder: ir.IRBuilder, tile: int, at: ir.Value) -> None:
    """Write a tile of sums, its rows one after the other."""
    _call(builder, "tilestored64", _I8(tile), at, I64(_LINE_BYTES))


def load_weights(builder: ir.IRBuilder, tile: int, at: ir.Value) -> None:
    """Read 16 pairs of inputs of 16 outputs, which lie one after the other."""
    load(builder, tile, at, I64(_LINE_BYTES))


def multiply_add(builder: ir.IRBuilder, sums: int, rows: int, weights: int) -> None:
    """Add the products of bfloat16. A row's sums do not depend on other rows. Denormal numbers count as zero."""
    _call(builder, "tdpbf16ps", *map(_I8, (sums, rows, weights)))


def prefetch(builder: ir.IRBuilder, at: ir.Value) -> None:
    """Prefetch a cache line without waiting for it. The address may be invalid."""
    kind = ir.FunctionType(ir.VoidType(), [at.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    # The numbers mean: for reading, into the nearest cache, as data.
    builder.call(function, [at, _I32(0), _I32(3), _I32(1)])


def _call(builder: ir.IRBuilder, name: str, *values: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), values)


def pointer(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any, i: int, at: ir.Value) -> ir.Value:
    """Return the address of element `at` of the array in argument i."""
    place = element_at(context, builder, signature.args[i], arguments[i], at)
    return builder.bitcast(place, _I8.as_pointer())


@subroutine()
def aligned(n_words):
    """Return an array of this many float32 that begins at a cache line."""
    whole = np.zeros(n_words + 16, np.float32)
    first = (-whole.ctypes.data % 64) // 4
    return whole[first : first + n_words]
