"""Compiles products with weights in float32 or bfloat16, for processors with AVX2 or AVX-512.

In float32 they take two thirds of oneDNN's time for one row, 0.85 of it for a dozen rows, and 1.0 to 1.2 times its time
for hundreds. With AVX2 they take 0.6 of it for one row, 0.75 for eight, and 1.1 times its time for hundreds. Weights in
bfloat16 are multiplied as pairs (AVX512_BF16), in 0.7 of oneDNN's time for up to eight rows, and in 0.93 to 0.98 of it
for many. Each row's sums are formed in the same order in any batch.

Layout: a block of sixteen outputs is read from its first code to its last. A code is an input in float32, or a pair of
inputs in bfloat16, for each of sixteen outputs. Up to four blocks are computed at once, so blocks are padded to whole
fours. Rows are taken six at a time. Six rows are copied side by side into a panel, code by code, because separate rows
would need more address registers than there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types

from hybridmem.memory.kernels.cpu.parts import array_at, compiled, has_many_registers, subroutine, untyped_intrinsic
from hybridmem.models.products.epilogue import block_epilogue
from hybridmem.models.products.integer_vectors import FLOATS, PAIRS_OF_BFLOAT, ZEROS, call, in_every_lane
from hybridmem.models.weights.layouts import BLOCK

BLOCKS = 4
"""Outputs are padded to a multiple of this many blocks of sixteen."""

UNROLLED = 16
"""The number of codes is padded to a multiple of this."""

SHORTS = np.empty(0, np.uint16)
"""An empty array with the dtype that stands for bfloat16."""

_PANEL_ROWS = 6
"""How many rows a panel has: with four blocks, their sums fill 24 of the 32 registers of AVX-512."""

_OF_PANEL, _OF_FOUR, _OF_TWO = (BLOCKS, BLOCKS, BLOCKS) if has_many_registers() else (1, 1, 2)
"""How many blocks are computed at once with six rows, four rows and two rows. With one row, it is always four.

AVX2 has 16 registers of eight numbers. The sums of six rows of one block fill 12 of them.
"""

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _tile(n_rows: int, n_blocks: int) -> Any:
    is_panel = n_rows == _PANEL_ROWS

    @untyped_intrinsic
    def tile(typing_context, codes, first_code, block_codes, x, first, n, ahead, sums):
        """Set sums[block, row] (16 each, flat) to the sums of rows and blocks. Nothing is checked.

        A block has `block_codes` codes, uint32 for pairs or float32. x has n codes for each row, of the same type, one
        row after the other from `first` on, or a panel of six, which also asks for the block at `ahead`.
        """
        is_paired = codes.dtype == types.uint32

        def codegen(context, builder, signature, arguments):
            b = builder
            weights_of_all, rows_of_all = (
                context.make_array(signature.args[i])(context, b, arguments[i]).data for i in (0, 3)
            )
            weights, rows = b.gep(weights_of_all, [arguments[1]]), b.gep(rows_of_all, [arguments[4]])
            block_codes, n_codes = arguments[2], arguments[5]
            before, loop, end = b.block, b.append_basic_block("codes"), b.append_basic_block("end")
            b.branch(loop)
            b.position_at_end(loop)
            first = b.phi(_I64)
            first.add_incoming(_I64(0), before)
            totals = [[b.phi(FLOATS) for _ in range(n_rows)] for _ in range(n_blocks)]
            for total in (total for block in totals for total in block):
                total.add_incoming(ZEROS, before)
            found = [list(block) for block in totals]
            for i in range(UNROLLED):
                code = b.add(first, _I64(i))
                own = [_load(b, weights, b.add(b.mul(block_codes, _I64(v)), b.mul(code, _I64(BLOCK))))
                       for v in range(n_blocks)]  # fmt: skip
                if is_panel:
                    _ask_for(b, weights_of_all, b.add(arguments[6], b.mul(code, _I64(BLOCK))))
                for row in range(n_rows):
                    if is_panel:
                        at = b.add(b.mul(first, _I64(n_rows)), _I64(i * n_rows + row))
                    else:
                        at = b.add(b.mul(n_codes, _I64(row)), code)
                    inputs = in_every_lane(b, b.load(b.gep(rows, [at]), align=2 if is_paired else 4))
                    for block, weight in zip(found, own, strict=True):
                        block[row] = _multiply_add(b, block[row], weight, inputs, is_paired)
            following = b.add(first, _I64(UNROLLED))
            first.add_incoming(following, loop)
            for block, values in zip(totals, found, strict=True):
                for total, value in zip(block, values, strict=True):
                    total.add_incoming(value, loop)
            b.cbranch(b.icmp_signed("<", following, n_codes), loop, end)
            b.position_at_end(end)
            out = context.make_array(signature.args[7])(context, b, arguments[7]).data
            for i, value in enumerate(value for block in found for value in block):
                b.store(value, b.bitcast(b.gep(out, [_I64(BLOCK * i)]), FLOATS.as_pointer()), align=4)
            return context.get_dummy_value()

        at = types.int64
        return types.void(codes, at, at, x, at, at, at, sums), codegen

    return tile


def _ask_for(b: ir.IRBuilder, weights: ir.Value, at: ir.Value) -> None:
    """Prefetch a line of weights into the second-level cache."""
    place = b.bitcast(b.gep(weights, [at]), ir.IntType(8).as_pointer())
    call(b, "llvm.prefetch.p0", ir.VoidType(), place, _I32(0), _I32(2), _I32(1))


def _load(b: ir.IRBuilder, weights: ir.Value, at: ir.Value) -> ir.Value:
    place = b.gep(weights, [at])
    return b.load(b.bitcast(place, ir.VectorType(place.type.pointee, BLOCK).as_pointer()), align=4)


def _multiply_add(b: ir.IRBuilder, sums: ir.Value, weight: ir.Value, x: ir.Value, is_paired: bool) -> ir.Value:
    if not is_paired:
        return call(b, f"llvm.fma.v{BLOCK}f32", FLOATS, weight, x, sums)
    pairs = (b.bitcast(weight, PAIRS_OF_BFLOAT), b.bitcast(x, PAIRS_OF_BFLOAT))
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, *pairs)


_panel, _tile_4 = _tile(_PANEL_ROWS, _OF_PANEL), _tile(4, _OF_FOUR)
_tile_2, _tile_1 = _tile(2, _OF_TWO), _tile(1, BLOCKS)


@compiled(parallel=True)
def product(codes, x_at, n_rows, n, bias, activation, n_parts, out_at, n_out, like):
    """Set out = activation(x W^T + bias).

    Args:
        codes: float32, or uint32 for pairs of bfloat16; see the module's docstring.
        x_at: the address of rows of n codes, where n is a multiple of `UNROLLED`.
        bias: (outputs,) or empty.
        activation: the activation's number in `epilogue.ACTIVATIONS`.
        n_parts: how many parts the outputs are divided into, one for each thread.
        out_at: the address of (n_rows, n_out) numbers of the dtype of `like`: float32, or uint16 with pairs.
    """
    x, block_codes = array_at(x_at, n_rows * n, codes), n * BLOCK
    out = array_at(out_at, n_rows * n_out, like)
    n_groups, n_panels = len(codes) // (block_codes * BLOCKS), n_rows // _PANEL_ROWS
    panels = np.empty(n_panels * _PANEL_ROWS * n, codes.dtype)
    for panel in prange(n_panels):
        _fill(panels, x, panel * _PANEL_ROWS * n, n)
    # In this case the rows are divided among threads instead.
    has_few_outputs = n_groups < 4 * n_parts and n_panels >= n_parts
    for part in prange(n_parts):
        sums = np.empty(BLOCKS * _PANEL_ROWS * BLOCK, np.float32)
        first_group, last_group = part * n_groups // n_parts, (part + 1) * n_groups // n_parts
        first_row, last_row = 0, n_rows
        if has_few_outputs:
            first_group, last_group = 0, n_groups
            first_row = part * n_panels // n_parts * _PANEL_ROWS
            last_row = (part + 1) * n_panels // n_parts * _PANEL_ROWS if part + 1 < n_parts else n_rows
        for o in range(first_group * BLOCKS, last_group * BLOCKS, BLOCKS):
            t = first_row
            while t < last_row:
                left, at, first = last_row - t, t * n, o * block_codes
                if left >= _PANEL_ROWS:
                    n_tile, n_blocks = _PANEL_ROWS, _OF_PANEL
                elif left >= 4:
                    n_tile, n_blocks = 4, _OF_FOUR
                elif left >= 2:
                    n_tile, n_blocks = 2, _OF_TWO
                else:
                    n_tile, n_blocks = 1, BLOCKS
                # The first panel waits for weights from main memory. Each of the next four prefetches a block for
                # later.
                n_panels_before = (t - first_row) // _PANEL_ROWS
                ahead = first
                if 0 < n_panels_before <= BLOCKS:
                    ahead += (BLOCKS + n_panels_before - 1) * block_codes
                for block in range(0, BLOCKS, n_blocks):
                    code = first + block * block_codes
                    if n_tile == _PANEL_ROWS:
                        _panel(codes, code, block_codes, panels, at, n, ahead if block == 0 else code, sums)
                    elif n_tile == 4:
                        _tile_4(codes, code, block_codes, x, at, n, code, sums)
                    elif n_tile == 2:
                        _tile_2(codes, code, block_codes, x, at, n, code, sums)
                    else:
                        _tile_1(codes, code, block_codes, x, at, n, code, sums)
                    for v in range(n_blocks):
                        place, channel = v * n_tile * BLOCK, (o + block + v) * BLOCK
                        block_epilogue(sums, place, n_tile, bias, activation, channel, out, t * n_out + channel, n_out)
                t += n_tile


@subroutine()
def _fill(panels, x, first, n):
    """Copy six rows of x into a panel, which has as many bytes as the rows."""
    for code in range(0, n, UNROLLED):
        for row in range(_PANEL_ROWS):
            for i in range(UNROLLED):
                panels[first + (code + i) * _PANEL_ROWS + row] = x[first + row * n + code + i]


@compiled(parallel=True)
def lay_out(weight_OP, n_parts, codes):
    """Fill codes from rows of codes (outputs, codes) of the same type. Codes of outputs beyond the last are zero."""
    n_out, n = weight_OP.shape
    n_blocks = len(codes) // (n * BLOCK)
    for part in prange(n_parts):
        for o in range(part * n_blocks // n_parts, (part + 1) * n_blocks // n_parts):
            for first in range(0, n, UNROLLED):
                at = (o * n + first) * BLOCK
                own = codes[at : at + UNROLLED * BLOCK]
                n_lanes = min(BLOCK, n_out - o * BLOCK)
                if n_lanes < BLOCK:
                    own[:] = 0
                for lane in range(n_lanes):
                    _spread(weight_OP[o * BLOCK + lane, first : first + UNROLLED], own, lane)


@subroutine()
def _spread(row, codes, lane):
    for i in range(len(row)):
        codes[i * BLOCK + lane] = row[i]
