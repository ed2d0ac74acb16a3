"""Multiplies one to four rows by weights of 8 and 4 bits as integers.

The results have the same bits as with tiles (`amx`).

This module and tiles read the same rows, whose sums over a group of inputs are exact (`row_units`).

A tile of one row takes as long as one of sixteen rows, because its weights are written to the cache and loaded again.
Here weights go from memory only through registers, 32 of them in two instructions, so that few rows wait only for the
weights' bytes. Processors without tiles use the same code (`integer_row_kernels`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types

from hybridmem.memory.kernels.cpu.parts import subroutine, untyped_intrinsic
from hybridmem.models.products import amx
from hybridmem.models.products.amx import I64
from hybridmem.models.products.epilogue import block_epilogue
from hybridmem.models.products.integer_vectors import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    INTS,
    ZEROS,
    Emitter,
    every,
    in_every_lane,
    layout_of_codes,
)
from hybridmem.models.products.row_ranges import multiply_back
from hybridmem.models.products.tile_kernels import add_while
from hybridmem.models.weights.layouts import BLOCK, GROUP, PAIRS

binding.initialize_native_asmparser()  # LLVM needs this parser for the assembly text in `_add_pairs`.

MOST_ROWS = 4
"""The most rows for which vectors were measured to be faster than tiles."""

AHEAD_BYTES = 2048
"""How many bytes ahead of the read position weights are prefetched, on processors with tiles."""

_NOTHING = every(0)


def _add_pairs(b: ir.IRBuilder, sums: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """Add the products of pairs of 16-bit integers, in a single instruction.

    This is inline assembly, because LLVM would turn its intrinsic into two instructions. With two, each sum would wait
    less for the one before it; but several independent sums are computed at once, so that waiting costs nothing.
    """
    return b.asm(ir.FunctionType(INTS, [INTS] * 3), "vpdpwssd $3, $2, $0", "=v,0,v,v", [sums, x, y], False)


def _add_pair_in_memory(b: ir.IRBuilder, sums: ir.Value, weights: ir.Value, row: ir.Value, pair: int) -> ir.Value:
    """Do the same as `_add_pairs` with one pair of a row, which the instruction itself reads for all lanes.

    LLVM does not know of this read, so the row must have been written by another function.
    """
    kind = ir.FunctionType(INTS, [INTS, INTS, row.type])
    return b.asm(kind, f"vpdpwssd {4 * pair}($3){{1to16}}, $2, $0", "=v,0,v,r", [sums, weights, row], False)


_Chains = dict[tuple[int, int], ir.Value]
"""Maps (the shift of the weights, a number) to sums of integers."""


class _Groups:
    """Emits the sums of rows over groups of 32 inputs of blocks, in vectors of a block's sixteen outputs.

    Args:
        blocks: the addresses of codes and scales.
        rows: the addresses of integers, units and sums of integers.
        ahead_bytes: how far ahead weights are prefetched; None if they are not.
    """

    def __init__(
        self, emitter: Emitter, blocks: list[list[ir.Value]], rows: list[list[ir.Value]], ahead_bytes: int | None
    ) -> None:
        self._emitter, self._blocks, self._rows, self._ahead_bytes = emitter, blocks, rows, ahead_bytes
        self._n_chains = max(1, 4 // (len(blocks) * len(rows)))

    def add(self, group: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        """Return totals plus the sums of a group: those of the first block's rows, then those of the next block's."""
        b, emitter, own = self._emitter.b, self._emitter, iter(totals)
        units = [in_every_lane(b, b.load(b.gep(unit, [group]), align=4)) for _, unit, _ in self._rows]
        rows_sums = [self._sums_of_row(row, group) for _, _, row in self._rows]
        found = list[ir.Value]()
        for (_, scales), integers in zip(self._blocks, self._sums(group, rows_sums), strict=True):
            own_scales = emitter.scales(scales, group)
            if self._ahead_bytes is not None:
                n_shorts = emitter.layout.unit_shorts * GROUP // max(GROUP, emitter.layout.unit_inputs)
                place = b.gep(scales, [b.add(b.mul(group, I64(n_shorts)), I64(8 * n_shorts))])
                amx.prefetch(b, b.bitcast(place, I8.as_pointer()))
            for unit, own_sums, row_sums in zip(units, integers, rows_sums, strict=True):
                total = next(own)
                for integer, row_sum, (scale, minimum) in zip(own_sums, row_sums, own_scales, strict=True):
                    total = emitter.fma(b.fmul(b.sitofp(integer, FLOATS), unit), scale, total)
                    if minimum is not None:
                        inputs = b.fmul(b.sitofp(in_every_lane(b, row_sum), FLOATS), unit)
                        total = emitter.fma(inputs, minimum, total)
                found.append(total)
        return found

    def _sums_of_row(self, row: ir.Value, group: ir.Value) -> list[ir.Value | None]:
        """Return the sums of a row's integers that share a scale, or None where these sums are not needed."""
        b, layout, halves = self._emitter.b, self._emitter.layout, self._emitter.layout.n_parts
        if not layout.zero and layout.minimum is None:
            return [None] * halves
        both = [b.load(b.gep(row, [b.add(b.mul(group, I64(2)), I64(half))]), align=4) for half in range(2)]
        return list(both) if halves == 2 else [b.add(*both)]

    def _sums(self, group: ir.Value, rows_sums: list[list[ir.Value | None]]) -> list[list[list[ir.Value]]]:
        """Return vectors of integers for each block and row: one for each scale.

        Each product waits for the one before it in its sum, so if there are few sums, each is divided into several.
        Codes taken from the higher bits of their words have separate sums, which count correspondingly more.
        """
        b, layout, halves = self._emitter.b, self._emitter.layout, self._emitter.layout.n_parts
        codes = [b.gep(own, [b.mul(group, I64(layout.code_bytes))]) for own, _ in self._blocks]
        if self._ahead_bytes is not None:
            for own in codes:
                for line in range(0, layout.code_bytes, 64):
                    amx.prefetch(b, b.gep(own, [I64(self._ahead_bytes + line)]))
        inputs = [b.bitcast(b.gep(row, [b.mul(group, I64(GROUP))]), I32.as_pointer()) for row, _, _ in self._rows]
        chains: list[list[list[_Chains]]] = [
            [[self._start(row_sum) for row_sum in row] for row in rows_sums] for _ in codes
        ]
        for pair, weights in enumerate(zip(*map(self._emitter.words, codes), strict=True)):
            half, chain = pair * halves // PAIRS, pair % self._n_chains
            for row, x in enumerate(inputs):
                both = None if len(codes) == 1 else in_every_lane(b, b.load(b.gep(x, [I64(pair)]), align=4))
                for own, (word, shift) in zip(chains, weights, strict=True):
                    place = own[row][half]
                    key = (shift, 0 if shift or layout.n_bits < 8 else chain)
                    old, integers = place.get(key, _NOTHING), b.bitcast(word, INTS)
                    place[key] = (
                        _add_pair_in_memory(b, old, integers, x, pair) if both is None
                        else _add_pairs(b, old, both, integers)
                    )  # fmt: skip
        return [[[self._sum(place) for place in row] for row in own] for own in chains]

    def _start(self, row_sum: ir.Value | None) -> _Chains:
        """Return the sum from which products start.

        Codes are greater than weights by the code of zero, which it subtracts.
        """
        if not self._emitter.layout.zero:
            return {}
        zero = self._emitter.b.mul(row_sum, I32(-self._emitter.layout.zero))
        return {(0, 0): in_every_lane(self._emitter.b, zero)}

    def _sum(self, chains: _Chains) -> ir.Value:
        b, total = self._emitter.b, None
        for (shift, _), part in chains.items():
            own = b.ashr(part, every(shift)) if shift else part
            total = own if total is None else b.add(total, own)
        return total


def sums_of(n_rows: int, n_blocks: int, ahead_bytes: int | None = AHEAD_BYTES) -> Any:
    """Return a function that multiplies some rows by some blocks of 16 outputs, in integers.

    Args:
        ahead_bytes: how far ahead weights are prefetched; None if they are not.
    """

    @untyped_intrinsic
    def multiply(
        typing_context, codes, first_code, n_groups, scales, first_scale, block_scales, rows, row, units, row_sums, sums
    ):  # fmt: skip
        """Multiply rows from `row` on by blocks of 16 outputs, and store their sums. Nothing is checked.

        `rows`, `units` and `row_sums` are results of `row_units.as_integers`. `sums` gets 16 numbers for each row of
        the first block, then those of the next block.
        """

        def codegen(context, builder, signature, arguments):
            b, emitter = builder, Emitter(builder, layout_of_codes(codes), is_paired=True)
            n_groups, block_scales = arguments[2], arguments[5]

            def pointer(i: int, at: ir.Value, element: ir.Type) -> ir.Value:
                return b.bitcast(amx.pointer(context, b, signature, arguments, i, at), element.as_pointer())

            def block(i: int) -> list[ir.Value]:
                code, scale = b.mul(n_groups, I64(i * emitter.layout.code_bytes)), b.mul(block_scales, I64(i))
                return [pointer(0, b.add(arguments[1], code), I8), pointer(3, b.add(arguments[4], scale), I16)]

            def row(i: int) -> list[ir.Value]:
                group = b.mul(b.add(arguments[7], I64(i)), n_groups)
                places = pointer(8, group, F32), pointer(9, b.mul(group, I64(2)), I32)
                return [pointer(6, b.mul(group, I64(GROUP)), I16), *places]

            groups = _Groups(emitter, [block(i) for i in range(n_blocks)], [row(i) for i in range(n_rows)], ahead_bytes)
            totals = [ZEROS] * n_rows * n_blocks
            _, totals = add_while(b, lambda group, _, own: groups.add(group, own), I64(0), n_groups, 1, totals)
            for i, total in enumerate(totals):
                b.store(total, pointer(10, I64(BLOCK * i), FLOATS), align=4)
            return context.get_dummy_value()

        at = types.int64
        return types.void(codes, at, at, scales, at, at, rows, at, units, row_sums, sums), codegen

    return multiply


_one, _two, _four = (sums_of(n, 1) for n in (1, 2, 4))
_one_by_four, _two_by_four, _four_by_two = sums_of(1, 4), sums_of(2, 4), sums_of(4, 2)


@subroutine()
def multiply_blocks(
    codes, scales, integers, units, row_sums, factors, first, last, n_groups, block_codes, bias, activation, out,
    n_rows, n_out,
):  # fmt: skip
    """Set out = activation(x W^T + bias) for at most `MOST_ROWS` rows and the outputs of blocks from `first` to `last`.

    Several blocks at once share what is loaded of the rows, and their weights come from as many addresses in parallel.

    Args:
        integers, units, row_sums: the results of `row_units.as_integers`.
        factors: a result of `row_ranges.in_range`.
        block_codes: how many codes a block has.
        others: as for `integer_tile_kernels.product`.
    """
    sums, o = np.empty(16 * BLOCK, np.float32), first
    block_scales = len(scales) // (len(codes) // block_codes)
    while o < last:
        code, scale, t = o * block_codes, o * block_scales, 0
        n_blocks = 4 if last - o >= 4 else 1
        while t < n_rows:
            n = 4 if n_rows - t >= 4 else min(n_rows - t, 2)
            if n_blocks == 1 and n == 1:
                _one(codes, code, n_groups, scales, scale, block_scales, integers, t, units, row_sums, sums)
            elif n_blocks == 1 and n == 2:
                _two(codes, code, n_groups, scales, scale, block_scales, integers, t, units, row_sums, sums)
            elif n_blocks == 1:
                _four(codes, code, n_groups, scales, scale, block_scales, integers, t, units, row_sums, sums)
            elif n == 1:
                _one_by_four(codes, code, n_groups, scales, scale, block_scales, integers, t, units, row_sums, sums)
            elif n == 2:
                _two_by_four(codes, code, n_groups, scales, scale, block_scales, integers, t, units, row_sums, sums)
            else:
                for i in range(0, 4, 2):
                    own_code, own_scale = code + i * block_codes, scale + i * block_scales
                    own = sums[4 * i * BLOCK :]
                    _four_by_two(
                        codes, own_code, n_groups, scales, own_scale, block_scales, integers, t, units, row_sums, own
                    )
            for i in range(n_blocks):
                channel = (o + i) * BLOCK
                multiply_back(sums, i * n * BLOCK, n, factors, t)
                block_epilogue(sums, i * n * BLOCK, n, bias, activation, channel, out, t * n_out + channel, n_out)
            t += n
        o += n_blocks
