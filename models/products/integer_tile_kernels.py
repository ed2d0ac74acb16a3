"""Compiles products with weights of 2 to 8 bits for processors that multiply tiles (`amx`).

The layout is that of `quantised_kernels`. A group of 32 inputs of a block's 16 outputs is a tile. Its integers become
bfloat16, which is exact, and the sums of each group are multiplied by its scales. If all groups of a block have the
same scales, the sums of groups are added first. A row has the same bits in any batch. Up to four rows are multiplied by
`integer_few_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba import prange, types

from hybridmem.memory.kernels.cpu.parts import array_at, compiled, get, inlined, subroutine, untyped_intrinsic
from hybridmem.models.products import amx
from hybridmem.models.products.amx import I64, ROWS, ROWS_AT, TILE_BYTES, WEIGHTS_AT
from hybridmem.models.products.epilogue import block_epilogue
from hybridmem.models.products.integer_few_rows import AHEAD_BYTES, MOST_ROWS, multiply_blocks
from hybridmem.models.products.integer_vectors import (
    F32,
    FLOATS,
    I16,
    INTS,
    Emitter,
    every,
    in_every_lane,
    layout_of_codes,
)
from hybridmem.models.products.quantised_kernels import sums_of_rows
from hybridmem.models.products.row_ranges import in_range, multiply_back
from hybridmem.models.products.row_units import as_integers, in_units
from hybridmem.models.products.tile_kernels import CACHED_ROW_BYTES, add_while, repeat
from hybridmem.models.weights.layouts import BLOCK, PAIRS

_GROUPS = 4
"""How many groups of a block are unpacked at once.

More would fit into the first-level cache, but memory is read while groups are unpacked, and idle while their sums are
formed. With few groups the two alternate so fast that both keep going.
"""

_GROUPS_BY_ROW = 16
"""The same number for weights with one scale for each output.

It is larger, so that sums leave the registers less often.
"""

_AT_ONCE = 4
"""How many groups have their sums formed side by side, because each group waits for its tiles."""


_HALVES = np.empty(0, np.uint16)
"""An empty array with the dtype of rows' numbers."""


@untyped_intrinsic
def _sizes(typing_context, codes):
    """Return how many tiles 32 inputs of a block have, and how many inputs are summed for minima (0 if there are none).

    The number of tiles is 0 for weights in which all inputs of an output share a scale.
    """
    layout = layout_of_codes(codes)
    numbers = 0 if layout.is_by_row else layout.n_parts, layout.summed_inputs

    def codegen(context, builder, signature, arguments):
        return context.make_tuple(builder, signature.return_type, list(map(I64, numbers)))

    return types.UniTuple(types.int64, 2)(codes), codegen


@untyped_intrinsic
def _unpack(typing_context, codes, first_code, n_groups, panel):
    """Set `panel` to the integers of a block's groups, as pairs of bfloat16. Nothing is checked.

    A tile has zeros for inputs that do not have its scale.
    """

    def codegen(context, builder, signature, arguments):
        b, emitter = builder, Emitter(builder, layout_of_codes(codes), is_paired=True)
        n_bytes, n_tiles = emitter.layout.code_bytes, emitter.layout.n_parts
        source, target = (
            amx.pointer(context, b, signature, arguments, i, at) for i, at in ((0, arguments[1]), (3, I64(0)))
        )

        def unpack_group(group: ir.Value) -> None:
            own = b.gep(source, [b.mul(group, I64(n_bytes))])
            for line in range(n_bytes // 64):
                amx.prefetch(b, b.gep(own, [I64(AHEAD_BYTES + 64 * line)]))
            for pair, (weights,) in enumerate(emitter.weights(own)):
                for tile in range(n_tiles):
                    place = I64(tile * TILE_BYTES + TILE_BYTES // PAIRS * pair)
                    at = b.add(b.mul(group, I64(n_tiles * TILE_BYTES)), place)
                    numbers = b.bitcast(weights, INTS) if pair * n_tiles // PAIRS == tile else every(0)
                    b.store(numbers, b.bitcast(b.gep(target, [at]), INTS.as_pointer()), align=4)

        repeat(b, arguments[2], unpack_group)
        return context.get_dummy_value()

    return types.void(codes, types.int64, types.int64, panel), codegen


@dataclass
class _Groups:
    """Emits sums over groups of a panel, for the rows of a tile, in vectors of a block's outputs.

    Attributes:
        scales: the address of the block's scales.
        first_group: the number, in the block, of the panel's first group.
        row_sums, row_stride: sums of the first row's inputs from the panel's first group on; the next row's are so far
            after them.
    """

    emitter: Emitter
    panel: ir.Value
    scales: ir.Value
    first_group: ir.Value
    rows: ir.Value
    row_bytes: ir.Value
    row_sums: ir.Value
    row_stride: ir.Value
    parts: ir.Value

    def add(self, first: ir.Value, n: int, totals: list[ir.Value]) -> list[ir.Value]:
        """Return totals plus the sums of n groups, added in the groups' order."""
        b, n_tiles, totals = self.emitter.b, self.emitter.layout.n_parts, list(totals)
        for i in range(n * n_tiles):
            group = b.add(first, I64(i // n_tiles))
            tile = b.add(b.mul(first, I64(n_tiles)), I64(i))
            amx.zero(b, i)
            amx.load(b, ROWS_AT + i % 2, b.gep(self.rows, [b.mul(group, I64(4 * PAIRS))]), self.row_bytes)
            amx.load_weights(b, WEIGHTS_AT + i % 2, b.gep(self.panel, [b.mul(tile, I64(TILE_BYTES))]))
            amx.multiply_add(b, i, ROWS_AT + i % 2, WEIGHTS_AT + i % 2)
        for i in range(n * n_tiles):
            amx.store(b, i, b.gep(self.parts, [I64(TILE_BYTES * i)]))
        for i in range(n):
            group = b.add(first, I64(i))
            scales = self.emitter.scales(self.scales, b.add(self.first_group, group))
            for half, (scale, minimum) in enumerate(scales):
                for row in range(ROWS):
                    at = b.gep(self.parts, [I64(TILE_BYTES * (i * n_tiles + half) + 4 * BLOCK * row)])
                    part = b.load(b.bitcast(at, FLOATS.as_pointer()), align=4)
                    totals[row] = self.emitter.fma(part, scale, totals[row])
                    if minimum is not None:
                        place = b.add(b.mul(self.row_stride, I64(row)), b.add(b.mul(group, I64(n_tiles)), I64(half)))
                        own = in_every_lane(b, b.load(b.gep(self.row_sums, [place]), align=4))
                        totals[row] = self.emitter.fma(own, minimum, totals[row])
        return totals


@untyped_intrinsic
def _add_groups(
    typing_context, codes, panel, first_group, n_groups, scales, first_scale, x, first_pair, n_pairs, row_sums,
    first_sum, row_stride, parts, sums, at,
):  # fmt: skip
    """Add to sums[at : at + 256] the sums of a tile of rows over groups of a panel, times their scales.

    Nothing is checked.
    """

    def codegen(context, builder, signature, arguments):
        b, zero, emitter = builder, I64(0), Emitter(builder, layout_of_codes(codes), is_paired=True)

        def pointer(i: int, at: ir.Value, element: ir.Type | None = None) -> ir.Value:
            found = amx.pointer(context, b, signature, arguments, i, at)
            return found if element is None else b.bitcast(found, element.as_pointer())

        groups = _Groups(
            emitter, pointer(1, zero), pointer(4, arguments[5], I16), arguments[2], pointer(6, arguments[7]),
            b.mul(arguments[8], I64(4)), pointer(9, arguments[10], F32), arguments[11], pointer(12, zero),
        )  # fmt: skip
        places = [pointer(13, b.add(arguments[14], I64(BLOCK * row)), FLOATS) for row in range(ROWS)]
        totals = [b.load(place, align=4) for place in places]
        at_once = _AT_ONCE // emitter.layout.n_parts
        group, totals = add_while(b, groups.add, zero, arguments[3], at_once, totals)
        _, totals = add_while(b, groups.add, group, arguments[3], 1, totals)
        for place, total in zip(places, totals, strict=True):
            b.store(total, place, align=4)
        return context.get_dummy_value()

    i = types.int64
    return types.void(codes, panel, i, i, scales, i, x, i, i, row_sums, i, i, parts, sums, i), codegen


@untyped_intrinsic
def _add_products(typing_context, panel, n_groups, x, first_pair, n_pairs, parts, sums, at):
    """Add to sums[at : at + 256] the sums of a tile of rows over groups of a panel, without scales.

    Nothing is checked.
    """

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


@compiled(parallel=True)
def product(codes, scales, x_at, n_rows, n_pairs, shape, bias, activation, n_parts, out_at, n_out, like):
    """Set out = activation(x W^T + bias), with weights of 2 to 8 bits.

    Args:
        codes, scales: as for `quantised_kernels.product`.
        x_at: the address of rows of bfloat16, with n_pairs pairs each, a multiple of 16.
        shape: the result of `amx.shape` for the number of rows, at least one.
        bias, activation, n_parts: as for `blocked_kernels.product`.
        out_at: the address of (n_rows, n_out) numbers of the dtype of `like`.
    """
    rows, factors = in_range(array_at(x_at, 2 * n_rows * n_pairs, _HALVES), n_rows, 2 * n_pairs)
    x, out = rows.view(np.uint32), array_at(out_at, n_rows * n_out, like)
    n_blocks, n_groups = (n_out + BLOCK - 1) // BLOCK, n_pairs // PAIRS
    block_codes, block_scales = len(codes) // n_blocks, len(scales) // n_blocks
    n_tiles, n_summed = _sizes(codes)
    is_by_row = n_tiles == 0
    n_unpacked = _GROUPS_BY_ROW if is_by_row else _GROUPS
    if n_rows <= MOST_ROWS and not is_by_row:
        integers, units, integer_sums = as_integers(x)
        for part in prange(n_parts):
            multiply_blocks(
                codes, scales, integers, units, integer_sums, factors, part * n_blocks // n_parts,
                (part + 1) * n_blocks // n_parts, n_groups, block_codes, bias, activation, out, n_rows, n_out,
            )  # fmt: skip
        return
    if not is_by_row:
        rounded = amx.aligned(len(x)).view(np.uint32)
        for t in prange(n_rows):
            in_units(x, t * n_pairs, n_groups, rounded)
        x = rounded
    n_sums = 2 * n_pairs // n_summed if n_summed > 0 else 0
    row_sums = np.zeros((n_rows + ROWS) * n_sums, np.float32)
    if n_summed > 0:
        row_sums[: n_rows * n_sums] = sums_of_rows(codes, x.view(np.uint16), n_rows, 2 * n_pairs)
    at_once = max(ROWS, CACHED_ROW_BYTES // (4 * n_pairs) // ROWS * ROWS)
    for part in prange(n_parts):
        amx.configure(shape)
        parts, panel = amx.aligned(_AT_ONCE * ROWS * BLOCK), amx.aligned(n_unpacked * max(1, n_tiles) * TILE_BYTES // 4)
        sums = amx.aligned(min(at_once + 2 * ROWS, (n_rows + ROWS - 1) // ROWS * ROWS) * BLOCK)
        start = 0
        while start < n_rows:
            end = n_rows if n_rows - start < at_once + ROWS else start + at_once
            for o in range(part * n_blocks // n_parts, (part + 1) * n_blocks // n_parts):
                sums[:] = np.float32(0.0)
                for group in range(0, n_groups, n_unpacked):
                    n = min(n_unpacked, n_groups - group)
                    _unpack(codes, o * block_codes + group * (block_codes // n_groups), n, panel)
                    for at in range(0, end - start, ROWS):
                        t = _first_row(start, end, at)
                        pair, place = t * n_pairs + group * PAIRS, at * BLOCK
                        if is_by_row:
                            _add_products(panel, n, x, pair, n_pairs, parts, sums, place)
                        else:
                            _add_groups(
                                codes, panel, group, n, scales, o * block_scales, x, pair, n_pairs, row_sums,
                                t * n_sums + group * n_tiles, n_sums, parts, sums, place,
                            )  # fmt: skip
                for at in range(0, end - start, ROWS):
                    t = _first_row(start, end, at)
                    if is_by_row:
                        _scale(sums, at * BLOCK, scales, o * BLOCK)
                    n, channel = min(ROWS, end - t), o * BLOCK
                    multiply_back(sums, at * BLOCK, n, factors, t)
                    block_epilogue(sums, at * BLOCK, n, bias, activation, channel, out, t * n_out + channel, n_out)
            start = end
        amx.release()


@inlined
def _first_row(start, end, at):
    """Return the first row of a tile. The last tile begins earlier, so that it has as many rows as the others."""
    return max(start, min(start + at, end - ROWS))


@subroutine()
def _scale(sums, first, scales, first_scale):
    """Multiply the sums of a tile by the scales of its outputs."""
    for row in range(ROWS):
        for lane in range(BLOCK):
            sums[first + row * BLOCK + lane] *= get(scales, first_scale + lane)
