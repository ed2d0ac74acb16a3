"""Multiplies one to four rows by weights of 8 and 4 bits in integers; results have the bits that tiles (`amx`) give.

Both read the same rows, whose sums over a group of inputs are exact (`row_units`).

A tile of one row takes as long as one of sixteen: its weights are written to the cache and loaded again. Here they go
from memory through registers alone, 32 of them in two instructions, so that few rows wait for the weights' bytes only.
Processors without tiles use the same (`integer_row_kernels`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types

from hybridmem.memory.kernels.cpu.numbers import untyped_intrinsic
from hybridmem.models.products import amx
from hybridmem.models.products.amx import I64
from hybridmem.models.products.epilogue import block_epilogue
from hybridmem.models.products.integer_vectors import (
    BLOCK,
    F32,
    FLOATS,
    GROUP,
    I8,
    I16,
    I32,
    INTS,
    ZEROS,
    Emitter,
    every,
    in_every_lane,
)
from hybridmem.models.products.row_ranges import multiply_back
from hybridmem.models.products.tile_kernels import add_while

binding.initialize_native_asmparser()  # it reads `_add_pairs`

MOST_ROWS = 4
"""The most rows of a product for which vectors were measured to be faster than tiles."""

AHEAD_BYTES = 2048
"""The distance at which weights are prefetched, ahead of those that are being read, beside tiles."""

_NOTHING = every(0)


def _add_pairs(b: ir.IRBuilder, sums: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """Add the products of pairs of 16-bit integers, in one instruction.

    LLVM would make two of its intrinsic, which wait less for each other, but of these there are several sums.
    """
    return b.asm(ir.FunctionType(INTS, [INTS] * 3), "vpdpwssd $3, $2, $0", "=v,0,v,v", [sums, x, y], False)


def _add_pair_in_memory(b: ir.IRBuilder, sums: ir.Value, weights: ir.Value, row: ir.Value, pair: int) -> ir.Value:
    """Do the same with one pair of a row, which the instruction reads itself for all lanes.

    LLVM does not know that: the row must have been written by another function.
    """
    kind = ir.FunctionType(INTS, [INTS, INTS, row.type])
    return b.asm(kind, f"vpdpwssd {4 * pair}($3){{1to16}}, $2, $0", "=v,0,v,r", [sums, weights, row], False)


class _Groups:
    """Emits the sums of rows over groups of 32 inputs of blocks, in vectors of a block's sixteen outputs.

    Args:
        blocks: addresses of codes and scales.
        rows: addresses of integers, units and offsets.
        ahead_bytes: how far ahead weights are asked for; None if they are not.
    """

    def __init__(
        self, emitter: Emitter, blocks: list[list[ir.Value]], rows: list[list[ir.Value]], ahead_bytes: int | None
    ) -> None:
        self._emitter, self._blocks, self._rows, self._ahead_bytes = emitter, blocks, rows, ahead_bytes
        self._n_chains = max(1, 4 // (len(blocks) * len(rows)))

    def add(self, group: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        """Return totals plus the sums of a group: of the first block's rows, then of the next block's."""
        b, emitter, own = self._emitter.b, self._emitter, iter(totals)
        units = [in_every_lane(b, b.load(b.gep(unit, [group]), align=4)) for _, unit, _ in self._rows]
        found = list[ir.Value]()
        for (_, scales), integers in zip(self._blocks, self._sums(group), strict=True):
            scale = emitter.scales(b.gep(scales, [b.mul(group, I64(BLOCK))]))
            for unit, integer in zip(units, integers, strict=True):
                found.append(emitter.fma(b.fmul(b.sitofp(integer, FLOATS), unit), scale, next(own)))
        return found

    def _sums(self, group: ir.Value) -> list[list[ir.Value]]:
        """Return a vector of integers for each block and row.

        Each product waits for the one before it in its sum, so where there are few they have several sums each.
        """
        b, is_4 = self._emitter.b, self._emitter.n_bits == 4
        n_bytes = GROUP * BLOCK * self._emitter.n_bits // 8
        codes = [b.gep(own, [b.mul(group, I64(n_bytes))]) for own, _ in self._blocks]
        if self._ahead_bytes is not None:
            for own in codes:
                for line in range(0, n_bytes, 64):
                    amx.prefetch(b, b.gep(own, [I64(self._ahead_bytes + line)]))
        inputs = [b.bitcast(b.gep(row, [b.mul(group, I64(GROUP))]), I32.as_pointer()) for row, _, _ in self._rows]
        offsets = [in_every_lane(b, b.load(b.gep(own, [group]), align=4)) if is_4 else None for _, _, own in self._rows]
        n_chains = 2 if is_4 else self._n_chains  # codes of 4 bits in odd places count sixteenfold
        sums = [[[offset] + [None] * (n_chains - 1) for offset in offsets] for _ in codes]
        for pair, weights in enumerate(zip(*map(self._emitter.words, codes), strict=True)):
            for row, x in enumerate(inputs):
                both = None if len(codes) == 1 else in_every_lane(b, b.load(b.gep(x, [I64(pair)]), align=4))
                for chains, own in zip(sums, weights, strict=True):
                    old, integers = chains[row][pair % n_chains] or _NOTHING, b.bitcast(own, INTS)
                    chains[row][pair % n_chains] = (
                        _add_pair_in_memory(b, old, integers, x, pair) if both is None
                        else _add_pairs(b, old, both, integers)
                    )  # fmt: skip
        return [[self._sum(chains, is_4=is_4) for chains in own] for own in sums]

    def _sum(self, parts: list[ir.Value], *, is_4: bool) -> ir.Value:
        b, total = self._emitter.b, parts[0]
        for part in parts[1:]:
            total = b.add(total, b.ashr(part, every(4)) if is_4 else part)
        return total


def sums_of(n_rows: int, n_blocks: int, ahead_bytes: int | None = AHEAD_BYTES) -> Any:
    """Return a function that multiplies some rows by some blocks of 16 outputs, in integers.

    Args:
        ahead_bytes: how far ahead weights are prefetched; None if they are not.
    """

    @untyped_intrinsic
    def multiply(typing_context, codes, first_code, n_groups, scales, first_scale, rows, row, units, offsets, sums):
        """Multiply rows from `row` on by blocks of 16 outputs, and store their sums; not checked.

        `rows`, `units` and `offsets` are those of `row_units.as_integers`. Each group of inputs counts times its scale.
        `sums` gets 16 numbers for each row of the first block, then those of the next block.
        """

        def codegen(context, builder, signature, arguments):
            b, emitter = builder, Emitter(builder, 8 if codes.dtype == types.int8 else 4, is_paired=True)
            n_groups = arguments[2]

            def pointer(i: int, at: ir.Value, element: ir.Type) -> ir.Value:
                return b.bitcast(amx.pointer(context, b, signature, arguments, i, at), element.as_pointer())

            def block(i: int) -> list[ir.Value]:
                code = b.mul(n_groups, I64(i * GROUP * BLOCK * emitter.n_bits // 8))
                scale = b.mul(n_groups, I64(i * BLOCK))
                return [pointer(0, b.add(arguments[1], code), I8), pointer(3, b.add(arguments[4], scale), I16)]

            def row(i: int) -> list[ir.Value]:
                group = b.mul(b.add(arguments[6], I64(i)), n_groups)
                return [pointer(5, b.mul(group, I64(GROUP)), I16), pointer(7, group, F32), pointer(8, group, I32)]

            groups = _Groups(emitter, [block(i) for i in range(n_blocks)], [row(i) for i in range(n_rows)], ahead_bytes)
            totals = [ZEROS] * n_rows * n_blocks
            _, totals = add_while(b, lambda group, _, own: groups.add(group, own), I64(0), n_groups, 1, totals)
            for i, total in enumerate(totals):
                b.store(total, pointer(9, I64(BLOCK * i), FLOATS), align=4)
            return context.get_dummy_value()

        at = types.int64
        return types.void(codes, at, at, scales, at, rows, at, units, offsets, sums), codegen

    return multiply


_one, _two, _four = (sums_of(n, 1) for n in (1, 2, 4))
_one_by_four, _two_by_four, _four_by_two = sums_of(1, 4), sums_of(2, 4), sums_of(4, 2)


@njit(error_model="numpy")
def multiply_blocks(
    codes, scales, integers, units, offsets, factors, first, last, n_groups, block_codes, bias, activation, out, n_rows,
    n_out,
):  # fmt: skip
    """Set out = activation(x W^T + bias) of at most `MOST_ROWS` rows, for outputs of blocks from `first` to `last`.

    Several blocks at once share what is loaded of the rows, and their weights come in as many streams.

    Args:
        integers, units, offsets: what `row_units.as_integers` returns.
        factors: from `row_ranges.in_range`.
        block_codes: codes of a block.
        others: as for `integer_tile_kernels.product`.
    """
    sums, o = np.empty(16 * BLOCK, np.float32), first
    while o < last:
        code, scale, t = o * block_codes, o * n_groups * BLOCK, 0
        n_blocks = 4 if last - o >= 4 else 1
        while t < n_rows:
            n = 4 if n_rows - t >= 4 else min(n_rows - t, 2)
            if n_blocks == 1 and n == 1:
                _one(codes, code, n_groups, scales, scale, integers, t, units, offsets, sums)
            elif n_blocks == 1 and n == 2:
                _two(codes, code, n_groups, scales, scale, integers, t, units, offsets, sums)
            elif n_blocks == 1:
                _four(codes, code, n_groups, scales, scale, integers, t, units, offsets, sums)
            elif n == 1:
                _one_by_four(codes, code, n_groups, scales, scale, integers, t, units, offsets, sums)
            elif n == 2:
                _two_by_four(codes, code, n_groups, scales, scale, integers, t, units, offsets, sums)
            else:
                for i in range(0, 4, 2):
                    own_code, own_scale = code + i * block_codes, scale + i * n_groups * BLOCK
                    own = sums[4 * i * BLOCK :]
                    _four_by_two(codes, own_code, n_groups, scales, own_scale, integers, t, units, offsets, own)
            for i in range(n_blocks):
                channel = (o + i) * BLOCK
                multiply_back(sums, i * n * BLOCK, n, factors, t)
                block_epilogue(sums, i * n * BLOCK, n, bias, activation, channel, out, t * n_out + channel, n_out)
            t += n
        o += n_blocks
