"""Compiles products with weights of 8 and 4 bits for processors that multiply tiles (`amx`).

The layout is that of `quantised_kernels`. A group of 32 inputs of a block's 16 outputs is a tile: its integers become
bfloat16, which is exact, and the sums of each group are multiplied by its scales; if all groups of a block have the
same, their sums are formed first. A row has the same bits in any company; up to four take another way
(`integer_few_rows`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types

from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.numbers import array_at, get, untyped_intrinsic
from hybridmem.models.products import amx
from hybridmem.models.products.amx import I64, ROWS, ROWS_AT, TILE_BYTES, WEIGHTS_AT
from hybridmem.models.products.epilogue import block_epilogue
from hybridmem.models.products.integer_few_rows import AHEAD_BYTES, MOST_ROWS, multiply_blocks
from hybridmem.models.products.integer_vectors import FLOATS, I16, INTS, Emitter, layout_of_codes
from hybridmem.models.products.row_ranges import in_range, multiply_back
from hybridmem.models.products.row_units import as_integers, in_units
from hybridmem.models.products.tile_kernels import CACHED_ROW_BYTES, add_while, repeat
from hybridmem.models.weights.layouts import BLOCK, PAIRS

_GROUPS = 4
"""Groups of a block that are unpacked at once. More would fit into the first-level cache, but memory is read while they
are unpacked, and waits while their sums are formed: with few groups the two take turns so fast that both go on.
"""

_GROUPS_BY_ROW = 16
"""The same for weights with one scale an output: their sums leave the registers less often."""

_AT_ONCE = 4
"""Groups whose sums are formed side by side, because each waits for its tiles."""


_HALVES = np.empty(0, np.uint16)
"""The type of rows' numbers."""


@untyped_intrinsic
def _unpack(typing_context, codes, first_code, n_groups, panel):
    """Set panel to the integers of a block's groups, as pairs of bfloat16; not checked."""

    def codegen(context, builder, signature, arguments):
        b, emitter = builder, Emitter(builder, layout_of_codes(codes), is_paired=True)
        source, target = (
            amx.pointer(context, b, signature, arguments, i, at) for i, at in ((0, arguments[1]), (3, I64(0)))
        )

        def unpack_group(group: ir.Value) -> None:
            own = b.gep(source, [b.mul(group, I64(emitter.layout.code_bytes))])
            for line in range(emitter.layout.code_bytes // 64):
                amx.prefetch(b, b.gep(own, [I64(AHEAD_BYTES + 64 * line)]))
            for pair, (weights,) in enumerate(emitter.weights(own)):
                at = b.add(b.mul(group, I64(TILE_BYTES)), I64(TILE_BYTES // PAIRS * pair))
                b.store(b.bitcast(weights, INTS), b.bitcast(b.gep(target, [at]), INTS.as_pointer()), align=4)

        repeat(b, arguments[2], unpack_group)
        return context.get_dummy_value()

    return types.void(codes, types.int64, types.int64, panel), codegen


class _Groups:
    """Emits sums over groups of a panel, for the first `n_rows` rows of a tile, in vectors of a block's outputs."""

    def __init__(self, b: ir.IRBuilder, n_rows: int, panel: ir.Value, scales: ir.Value, rows: ir.Value,
                 row_bytes: ir.Value, parts: ir.Value) -> None:  # fmt: skip
        self.b, self.n_rows, self.panel, self.scales = b, n_rows, panel, scales
        self.rows, self.row_bytes, self.parts = rows, row_bytes, parts
        self.emitter = Emitter(b, 8, is_paired=True)

    def add(self, first: ir.Value, n: int, totals: list[ir.Value]) -> list[ir.Value]:
        """Return totals plus the sums of n groups, in their order."""
        b = self.b
        for i in range(n):
            group = b.add(first, I64(i))
            amx.zero(b, i)
            amx.load(b, ROWS_AT + i % 2, b.gep(self.rows, [b.mul(group, I64(4 * PAIRS))]), self.row_bytes)
            amx.load_weights(b, WEIGHTS_AT + i % 2, b.gep(self.panel, [b.mul(group, I64(TILE_BYTES))]))
            amx.multiply_add(b, i, ROWS_AT + i % 2, WEIGHTS_AT + i % 2)
        for i in range(n):
            amx.store(b, i, b.gep(self.parts, [I64(TILE_BYTES * i)]))
        for i in range(n):
            scale = self.emitter.scales(b.gep(self.scales, [b.mul(b.add(first, I64(i)), I64(BLOCK))]))
            for row in range(self.n_rows):
                at = b.gep(self.parts, [I64(TILE_BYTES * i + 4 * BLOCK * row)])
                totals[row] = self.emitter.fma(b.load(b.bitcast(at, FLOATS.as_pointer()), align=4), scale, totals[row])
        return totals


def _add_groups(n_rows: int) -> Any:
    @untyped_intrinsic
    def add_groups(typing_context, panel, n_groups, scales, first_scale, x, first_pair, n_pairs, parts, sums, at):
        """Add to sums[at : at + 16 n_rows] those of rows over groups of a panel, each times its scale; not checked."""

        def codegen(context, builder, signature, arguments):
            b, zero = builder, I64(0)

            def pointer(i: int, at: ir.Value) -> ir.Value:
                return amx.pointer(context, b, signature, arguments, i, at)

            scale_at = b.bitcast(pointer(2, arguments[3]), I16.as_pointer())
            groups = _Groups(b, n_rows, pointer(0, zero), scale_at, pointer(4, arguments[5]),
                             b.mul(arguments[6], I64(4)), pointer(7, zero))  # fmt: skip
            places = [
                b.bitcast(pointer(8, b.add(arguments[9], I64(BLOCK * row))), FLOATS.as_pointer())
                for row in range(n_rows)
            ]
            totals = [b.load(place, align=4) for place in places]
            group, totals = add_while(b, groups.add, zero, arguments[1], _AT_ONCE, totals)
            _, totals = add_while(b, groups.add, group, arguments[1], 1, totals)
            for place, total in zip(places, totals, strict=True):
                b.store(total, place, align=4)
            return context.get_dummy_value()

        i = types.int64
        return types.void(panel, i, scales, i, x, i, i, parts, sums, i), codegen

    return add_groups


@untyped_intrinsic
def _add_products(typing_context, panel, n_groups, x, first_pair, n_pairs, parts, sums, at):
    """Add to sums[at : at + 256] those of a tile of rows over groups of a panel, without scales; not checked."""

    def codegen(context, builder, signature, arguments):
        b, zero = builder, I64(0)

        def pointer(i: int, at: ir.Value) -> ir.Value:
            return amx.pointer(context, b, signature, arguments, i, at)

        weights, rows, parts = pointer(0, zero), pointer(2, arguments[3]), pointer(5, zero)
        row_bytes = b.mul(arguments[4], I64(4))
        for tile in range(_AT_ONCE):
            amx.zero(b, tile)

        def add(first: ir.Value, n: int) -> None:
            for i in range(n):
                group = b.add(first, I64(i))
                amx.load(b, ROWS_AT + i % 2, b.gep(rows, [b.mul(group, I64(4 * PAIRS))]), row_bytes)
                amx.load_weights(b, WEIGHTS_AT + i % 2, b.gep(weights, [b.mul(group, I64(TILE_BYTES))]))
                amx.multiply_add(b, i, ROWS_AT + i % 2, WEIGHTS_AT + i % 2)

        n_whole = b.udiv(arguments[1], I64(_AT_ONCE))
        with b.if_then(b.icmp_signed(">", n_whole, zero)):
            repeat(b, n_whole, lambda k: add(b.mul(k, I64(_AT_ONCE)), _AT_ONCE))
        done = b.mul(n_whole, I64(_AT_ONCE))
        with b.if_then(b.icmp_signed("<", done, arguments[1])):
            repeat(b, b.sub(arguments[1], done), lambda k: add(b.add(done, k), 1))
        for tile in range(_AT_ONCE):
            amx.store(b, tile, b.gep(parts, [I64(TILE_BYTES * tile)]))
        target = pointer(6, arguments[7])

        def add_row(row: ir.Value) -> None:
            offset = b.mul(row, I64(4 * BLOCK))
            place = b.bitcast(b.gep(target, [offset]), FLOATS.as_pointer())
            total = b.load(place, align=4)
            for tile in range(_AT_ONCE):
                own = b.gep(parts, [b.add(offset, I64(TILE_BYTES * tile))])
                total = b.fadd(total, b.load(b.bitcast(own, FLOATS.as_pointer()), align=4))
            b.store(total, place, align=4)

        repeat(b, I64(ROWS), add_row)
        return context.get_dummy_value()

    i = types.int64
    return types.void(panel, i, x, i, i, parts, sums, i), codegen


_FEW = 4
_of_few, _of_many = _add_groups(_FEW), _add_groups(ROWS)


@compiled(parallel=True, error_model="numpy")
def product(codes, scales, x_at, n_rows, n_pairs, shape, bias, activation, n_parts, out_at, n_out, like):
    """Set out = activation(x W^T + bias), with weights of 8 or 4 bits.

    Args:
        codes, scales: as for `quantised_kernels.product`.
        x_at: address of rows of bfloat16, n_pairs of them, a multiple of 16.
        shape: `amx.shape` for the number of rows, at least one.
        bias, activation, n_parts: as for `blocked_kernels.product`.
        out_at: address of (n_rows, n_out) numbers of the type that `like` holds.
    """
    rows, factors = in_range(array_at(x_at, 2 * n_rows * n_pairs, _HALVES), n_rows, 2 * n_pairs)
    x, out = rows.view(np.uint32), array_at(out_at, n_rows * n_out, like)
    n_blocks, n_groups = (n_out + BLOCK - 1) // BLOCK, n_pairs // PAIRS
    block_codes = len(codes) // n_blocks
    is_by_row = len(scales) < n_blocks * n_groups * BLOCK
    n_unpacked = _GROUPS_BY_ROW if is_by_row else _GROUPS
    if n_rows <= MOST_ROWS and not is_by_row:
        integers, units, row_sums = as_integers(x)
        for part in prange(n_parts):
            multiply_blocks(
                codes, scales, integers, units, row_sums, factors, part * n_blocks // n_parts,
                (part + 1) * n_blocks // n_parts, n_groups, block_codes, bias, activation, out, n_rows, n_out,
            )  # fmt: skip
        return
    if not is_by_row:
        rounded = amx.aligned(len(x)).view(np.uint32)
        for t in prange(n_rows):
            in_units(x, t * n_pairs, n_groups, rounded)
        x = rounded
    at_once = max(ROWS, CACHED_ROW_BYTES // (4 * n_pairs) // ROWS * ROWS)
    for part in prange(n_parts):
        amx.configure(shape)
        parts, panel = amx.aligned(_AT_ONCE * ROWS * BLOCK), amx.aligned(n_unpacked * TILE_BYTES // 4)
        sums = amx.aligned(min(at_once + 2 * ROWS, (n_rows + ROWS - 1) // ROWS * ROWS) * BLOCK)
        start = 0
        while start < n_rows:
            end = n_rows if n_rows - start < at_once + ROWS else start + at_once
            for o in range(part * n_blocks // n_parts, (part + 1) * n_blocks // n_parts):
                sums[:] = np.float32(0.0)
                for group in range(0, n_groups, n_unpacked):
                    n = min(n_unpacked, n_groups - group)
                    _unpack(codes, o * block_codes + group * (block_codes // n_groups), n, panel)
                    scale = (o * n_groups + group) * BLOCK
                    for at in range(0, end - start, ROWS):
                        t = _first_row(start, end, at)
                        pair, place = t * n_pairs + group * PAIRS, at * BLOCK
                        if is_by_row:
                            _add_products(panel, n, x, pair, n_pairs, parts, sums, place)
                        elif n_rows <= _FEW:
                            _of_few(panel, n, scales, scale, x, pair, n_pairs, parts, sums, place)
                        else:
                            _of_many(panel, n, scales, scale, x, pair, n_pairs, parts, sums, place)
                for at in range(0, end - start, ROWS):
                    t = _first_row(start, end, at)
                    if is_by_row:
                        _scale(sums, at * BLOCK, scales, o * BLOCK)
                    n, channel = min(ROWS, end - t), o * BLOCK
                    multiply_back(sums, at * BLOCK, n, factors, t)
                    block_epilogue(sums, at * BLOCK, n, bias, activation, channel, out, t * n_out + channel, n_out)
            start = end
        amx.release()


@njit(inline="always")
def _first_row(start, end, at):
    """Return the first row of a tile: the last tile begins earlier, so that it has as many rows as the others."""
    return max(start, min(start + at, end - ROWS))


@njit(error_model="numpy")
def _scale(sums, first, scales, first_scale):
    """Multiply a tile's sums by its outputs' scales."""
    for row in range(ROWS):
        for lane in range(BLOCK):
            sums[first + row * BLOCK + lane] *= get(scales, first_scale + lane)
