"""Emits the sums of one or two rows with weights of 8 and 4 bits in vectors, to the bits that tiles (`amx`) give.

A tile of one row takes as long as one of sixteen: its weights are written to the cache and loaded again. Here they go
from memory through registers alone, so that a step of one sequence waits for little more than the weights' bytes.

TDPBF16PS adds the products of all pairs' first inputs and those of their second ones apart, each in float32 with one
rounding, and the two sums at last; so does this. Denormal inputs count as zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from memory.kernels.cpu.numbers import untyped_intrinsic
from models.layers import amx
from models.layers.amx import I64
from models.layers.integer_vectors import (
    BLOCK,
    F32,
    FLOATS,
    GROUP,
    I8,
    I16,
    INTS,
    PAIRS,
    ZEROS,
    Emitter,
    in_every_lane,
)
from models.layers.tile_kernels import add_while

MOST_ROWS = 2
"""The most rows of a product for which vectors were measured to be faster than tiles."""

AHEAD_BYTES = 2048
"""The distance at which weights are prefetched, ahead of those that are being read."""


_AT_ONCE = {1: 2, 2: 1}
"""Groups whose sums are formed side by side, by rows: each product waits for the one before it in its sum."""


class _Bytes:
    """Emits vectors of 8-bit weights in the order of memory: each holds eight outputs, with two inputs of each.

    To part them into a vector of first and one of second inputs would take a third more instructions.
    """

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter

    def weights(self, codes: ir.Value) -> Iterator[list[ir.Value]]:
        """Yield the weights of each pair of inputs of a group as two vectors; `codes` is the group's address."""
        for pair in range(PAIRS):
            yield [self._emitter.consecutive(codes, (2 * pair + k) * BLOCK) for k in range(2)]

    def inputs(self, x: ir.Value, pair: int) -> list[ir.Value]:
        """Load a pair of inputs of row `x`, as the two vectors by which the weights of this pair are multiplied."""
        b = self._emitter.b
        both = b.load(b.bitcast(b.gep(x, [I64(2 * pair)]), I64.as_pointer()), align=4)
        return [b.bitcast(in_every_lane(b, both, BLOCK // 2), FLOATS)] * 2

    def sums(self, parts: list[ir.Value]) -> list[ir.Value]:
        """Return two vectors of sixteen outputs: the sums over first inputs of pairs, and those over second ones."""
        places = (ir.Constant(INTS, list(range(k, 2 * BLOCK, 2))) for k in range(2))
        return [self._emitter.b.shuffle_vector(*parts, place) for place in places]


class _Nibbles:
    """Emits vectors of 4-bit weights, each of which holds sixteen outputs and one input."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter

    def weights(self, codes: ir.Value) -> Iterator[list[ir.Value]]:
        """Yield the weights of each pair of inputs of a group as two vectors; `codes` is the group's address."""
        return self._emitter.weights(codes)

    def inputs(self, x: ir.Value, pair: int) -> list[ir.Value]:
        """Load a pair of inputs of row `x`, as the two vectors by which the weights of this pair are multiplied."""
        b = self._emitter.b
        return [in_every_lane(b, b.load(b.gep(x, [I64(2 * pair + k)]), align=4)) for k in range(2)]

    def sums(self, parts: list[ir.Value]) -> list[ir.Value]:
        """Return two vectors of sixteen outputs: the sums over first inputs of pairs, and those over second ones."""
        return parts


class _Groups:
    """Emits the sums of one or two rows over groups of 32 inputs, in vectors of a block's sixteen outputs."""

    def __init__(self, emitter: Emitter, codes: ir.Value, scales: ir.Value, rows: list[ir.Value]) -> None:
        self._emitter, self._form = emitter, (_Bytes if emitter.n_bits == 8 else _Nibbles)(emitter)
        self._codes, self._scales, self._rows = codes, scales, rows

    def add(self, first: ir.Value, n: int, totals: list[ir.Value]) -> list[ir.Value]:
        """Return totals plus the sums of n groups, in their order."""
        b = self._emitter.b
        groups = [b.add(first, I64(i)) for i in range(n)]
        sums = list(zip(*map(self._steps, groups), strict=True))[-1]
        for group, of_rows in zip(groups, sums, strict=True):
            scale = self._emitter.scales(b.gep(self._scales, [b.mul(group, I64(BLOCK))]))
            totals = [self._emitter.fma(own, scale, total) for own, total in zip(of_rows, totals, strict=True)]
        return totals

    def _steps(self, group: ir.Value) -> Iterator[list[ir.Value]]:
        """Emit the products of a group pair by pair, so that those of several groups take turns; yields sums so far."""
        b, form = self._emitter.b, self._form
        n_bytes = GROUP * BLOCK * self._emitter.n_bits // 8
        codes = b.gep(self._codes, [b.mul(group, I64(n_bytes))])
        for line in range(0, n_bytes, 64):
            amx.prefetch(b, b.gep(codes, [I64(AHEAD_BYTES + line)]))
        inputs = [b.gep(row, [b.mul(group, I64(GROUP))]) for row in self._rows]
        parts = [[ZEROS, ZEROS] for _ in inputs]
        for pair, weights in enumerate(form.weights(codes)):
            for part, x in zip(parts, inputs, strict=True):
                part[:] = map(self._emitter.fma, weights, form.inputs(x, pair), part)
            yield []
        yield [b.fadd(*form.sums(part)) for part in parts]


def _sums_of(n_rows: int) -> Any:
    @untyped_intrinsic
    def sums_of(  # type: ignore[no-untyped-def]
        typing_context, codes, first_code, n_groups, scales, first_scale, rows, sums
    ):
        """Multiply rows of float32 by a block of 16 outputs, and store 16 sums a row in `sums`; not checked.
        Each group of inputs counts times its scale.
        """

        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            b, emitter = builder, Emitter(builder, 8 if codes.dtype == types.int8 else 4, is_paired=False)

            def pointer(i: int, at: ir.Value, element: ir.Type) -> ir.Value:
                return b.bitcast(amx.pointer(context, b, signature, arguments, i, at), element.as_pointer())

            inputs = [pointer(5, b.mul(arguments[2], I64(GROUP * row)), F32) for row in range(n_rows)]
            groups = _Groups(emitter, pointer(0, arguments[1], I8), pointer(3, arguments[4], I16), inputs)
            group, totals = add_while(b, groups.add, I64(0), arguments[2], _AT_ONCE[n_rows], [ZEROS] * n_rows)
            _, totals = add_while(b, groups.add, group, arguments[2], 1, totals)
            for row, total in enumerate(totals):
                b.store(total, pointer(6, I64(BLOCK * row), FLOATS), align=4)
            return context.get_dummy_value()

        at = types.int64
        return types.void(codes, at, at, scales, at, rows, sums), codegen

    return sums_of


sums_of_one, sums_of_two = _sums_of(1), _sums_of(2)


@njit(error_model="numpy")
def as_floats(pairs):  # type: ignore[no-untyped-def]
    """Convert pairs of bfloat16 to an array of float32, in their order; denormal numbers become zero."""
    row = np.empty(2 * len(pairs), np.float32)
    bits = row.view(np.uint32)
    for i in range(len(pairs)):
        first, second = np.uint32(pairs[i] << np.uint32(16)), np.uint32(pairs[i] & np.uint32(0xFFFF0000))
        bits[2 * i] = first if first & np.uint32(0x7F800000) else np.uint32(0)
        bits[2 * i + 1] = second if second & np.uint32(0x7F800000) else np.uint32(0)
    return row
