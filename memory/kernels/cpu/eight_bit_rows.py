"""Rounds rows of states to 8 bits on the CPU, and reads them (see `memory.kernels.eight_bits`)."""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types

from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.numbers import element_at, untyped_intrinsic
from hybridmem.memory.kernels.cpu.rows import as_array, copy_
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, inlined, subroutine
from hybridmem.memory.kernels.cpu.vectors import (
    LANES,
    larger_size,
    largest_of,
    load,
    load_8_bits,
    multiply,
    splat,
    store,
    store_8_bits,
)
from hybridmem.memory.kernels.eight_bits import (
    LARGEST,
    MIX_ELEMENT,
    MIX_FIRST,
    MIX_POSITION,
    MIX_ROW,
    MIX_SECOND,
    SCALE_BYTES,
)
from hybridmem.memory.kernels.signature import StateSlots

LARGEST_CODES = {np.dtype(np.int8): np.float32(LARGEST[torch.int8]), np.dtype(np.uint8): np.float32(448.0)}
"""The largest code, by the dtype of the array of codes: float8 is held in arrays of uint8."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_ELEMENT, _ROW, _POSITION, _FIRST, _SECOND = (
    np.uint32(x) for x in (MIX_ELEMENT, MIX_ROW, MIX_POSITION, MIX_FIRST, MIX_SECOND)
)
_15, _16 = np.uint32(15), np.uint32(16)


def has_8_bits(state: StateSlots) -> bool:
    return as_array(state.flat).dtype in LARGEST_CODES


@untyped_intrinsic
def scale_at(typing_context, codes, at):
    """Return the float32 in bytes [at, at + 4) of a contiguous array."""

    def codegen(context, builder, signature, arguments):
        pointer = element_at(context, builder, codes, *arguments)
        return builder.load(builder.bitcast(pointer, ir.FloatType().as_pointer()), align=1)

    return types.float32(codes, at), codegen


@untyped_intrinsic
def _put_scale(typing_context, codes, at, x):
    def codegen(context, builder, signature, arguments):
        pointer = element_at(context, builder, codes, *arguments[:2])
        builder.store(arguments[2], builder.bitcast(pointer, ir.FloatType().as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(codes, at, types.float32), codegen


@inlined
def _hash(row, position):
    """Return the chance of a row's first number: 32 bits. numba computes with 64 bits, so each product is cut to 32."""
    x = np.uint32(np.uint32(row) * _ROW + np.uint32(position) * _POSITION)
    x = np.uint32((x ^ (x >> _16)) * _FIRST)
    x = np.uint32((x ^ (x >> _15)) * _SECOND)
    return np.uint32(x ^ (x >> _16))


@subroutine()
def encode_row(row, largest, codes, at, number, position):
    """Write a row (float32) of a state from byte `at` on: codes, then the scale. `number` is the index of the row."""
    n = len(row)
    n_whole = n // LANES * LANES
    sizes = splat(_ZERO)
    for e in range(0, n_whole, LANES):
        sizes = larger_size(load(row, e), sizes)
    if n_whole < n:
        rest, codes_of_rest = np.zeros(LANES, np.float32), np.empty(LANES, codes.dtype)
        copy_(rest[: n - n_whole], row[n_whole:])
        sizes = larger_size(load(rest, 0), sizes)
    scale = largest_of(sizes) / largest
    inverse, chance = splat(_ONE / scale if scale > _ZERO else _ZERO), _hash(number, position)
    for e in range(0, n_whole, LANES):
        store_8_bits(codes, at + e, multiply(inverse, load(row, e)), np.uint32(chance + np.uint32(e) * _ELEMENT))
    if n_whole < n:
        first = np.uint32(chance + np.uint32(n_whole) * _ELEMENT)
        store_8_bits(codes_of_rest, 0, multiply(inverse, load(rest, 0)), first)
        copy_(codes[at + n_whole : at + n], codes_of_rest[: n - n_whole])
    _put_scale(codes, at + n, scale)


@subroutine()
def decode_row(codes, at, row):
    """Read a row from byte `at` on."""
    n = len(row)
    n_whole, scale = n // LANES * LANES, splat(scale_at(codes, at + n))
    for e in range(0, n_whole, LANES):
        store(row, e, multiply(scale, load_8_bits(codes, at + e)))
    if n_whole < n:
        own, rest = np.zeros(LANES, codes.dtype), np.empty(LANES, np.float32)
        copy_(own[: n - n_whole], codes[at + n_whole : at + n])
        store(rest, 0, multiply(scale, load_8_bits(own, 0)))
        copy_(row[n_whole:], rest[: n - n_whole])


@compiled(ELEMENTWISE, parallel=True)
def decode(codes, at, states):
    """Read a state (rows, N) from byte `at` on."""
    width = states.shape[1] + SCALE_BYTES
    for r in prange(len(states)):
        decode_row(codes, at + r * width, states[r])


@compiled(ELEMENTWISE, parallel=True)
def encode(states, largest, position, codes, at):
    """Write a state (rows, N) from byte `at` on. The state has seen `position` tokens."""
    width = states.shape[1] + SCALE_BYTES
    for r in prange(len(states)):
        encode_row(states[r], largest, codes, at + r * width, r, position)
