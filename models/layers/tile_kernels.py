"""Compiles products with weights in bfloat16 for processors that multiply tiles (`amx`).

The layout is that of `blocked_kernels`: there, 16 pairs of inputs of a block's 16 outputs lie in one piece, which is a
tile. Sums stay in the registers from the first input to the last. A row has the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, prange, types

from memory.kernels.cpu.compiled import compiled
from memory.kernels.cpu.numbers import array_at, untyped_intrinsic
from models.layers import amx
from models.layers.amx import I64, ROWS, ROWS_AT, TILE_BYTES, WEIGHTS_AT
from models.layers.blocked_kernels import BLOCKS, SHORTS, store_sums
from models.layers.integer_vectors import BLOCK, PAIRS
from models.layers.quantised_kernels import finish

CACHED_ROW_BYTES = 1 << 20
"""Rows that are multiplied by all weights of a thread before the next: they stay in the second-level cache."""


_AHEAD_BYTES, _LINES = 2048, 16
"""How far ahead weights are asked for where they are read once, and the lines of a tile.

Products of few rows take a tenth less time by that.
"""


def _sums_of(n_row_tiles: int, n_blocks: int) -> Any:
    @untyped_intrinsic
    def sums_of(typing_context, codes, first_code, block_codes, x, first_pair, n_pairs, sums):  # type: ignore[no-untyped-def]
        """Set sums[row tile, block] (16 x 16 each, flat) to the sums of rows and blocks; not checked.

        Codes and x are uint32 arrays of pairs; a block has `block_codes` of them, and a row `n_pairs`.
        """

        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            b = builder
            weights, rows = (amx.pointer(context, b, signature, arguments, i, arguments[i + 1]) for i in (0, 3))
            block_bytes, row_bytes = (b.mul(arguments[i], I64(4)) for i in (2, 5))
            for tile in range(n_row_tiles * n_blocks):
                amx.zero(b, tile)

            def add_products(k: ir.Value) -> None:
                for r in range(n_row_tiles):
                    at = b.add(b.mul(k, I64(4 * PAIRS)), b.mul(row_bytes, I64(ROWS * r)))
                    amx.load(b, ROWS_AT + r, b.gep(rows, [at]), row_bytes)
                for v in range(n_blocks):
                    at = b.add(b.mul(k, I64(TILE_BYTES)), b.mul(block_bytes, I64(v)))
                    for line in range(_LINES if n_row_tiles == 1 else 0):
                        amx.prefetch(b, b.gep(weights, [b.add(at, I64(_AHEAD_BYTES + TILE_BYTES // _LINES * line))]))
                    amx.load_weights(b, WEIGHTS_AT + v % 2, b.gep(weights, [at]))
                    for r in range(n_row_tiles):
                        amx.multiply_add(b, r * n_blocks + v, ROWS_AT + r, WEIGHTS_AT + v % 2)

            repeat(b, b.udiv(arguments[5], I64(PAIRS)), add_products)
            for tile in range(n_row_tiles * n_blocks):
                at = I64(ROWS * BLOCK * tile)
                amx.store(b, tile, amx.pointer(context, b, signature, arguments, 6, at))
            return context.get_dummy_value()

        at = types.int64
        return types.void(codes, at, at, x, at, at, sums), codegen

    return sums_of


def repeat(b: ir.IRBuilder, n: ir.Value, emit: Callable[[ir.Value], None]) -> None:
    """Emit a loop over 0 ... n - 1; n is at least 1."""
    before, loop, end = b.block, b.append_basic_block("loop"), b.append_basic_block("end")
    b.branch(loop)
    b.position_at_end(loop)
    i = b.phi(I64)
    i.add_incoming(I64(0), before)
    emit(i)
    following = b.add(i, I64(1))
    i.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, n), loop, end)
    b.position_at_end(end)


_one_by_four, _two_by_two = _sums_of(1, BLOCKS), _sums_of(2, 2)


@compiled(parallel=True, error_model="numpy")
def product(codes, x_at, n_rows, n_pairs, shape, bias, activation, n_parts, out_at, n_out):  # type: ignore[no-untyped-def]
    """Set out = activation(x W^T + bias), with weights in bfloat16.

    Args:
        shape: `amx.shape` for the number of rows, at least one.
        others: as for `blocked_kernels.product`.
    """
    x, block_codes = array_at(x_at, n_rows * n_pairs, codes), n_pairs * BLOCK
    out_TO = array_at(out_at, n_rows * n_out, SHORTS).reshape((n_rows, n_out))
    n_groups = len(codes) // (block_codes * BLOCKS)
    divides_rows = n_groups < 4 * n_parts and n_rows >= 2 * ROWS * n_parts  # there are few outputs
    at_once = max(2 * ROWS, CACHED_ROW_BYTES // (4 * n_pairs))
    for part in prange(n_parts):
        amx.configure(shape)
        sums = amx.aligned(4 * ROWS * BLOCK)
        first_group, last_group = part * n_groups // n_parts, (part + 1) * n_groups // n_parts
        first_row, last_row = 0, n_rows
        if divides_rows:
            first_group, last_group = 0, n_groups
            first_row, last_row = part * n_rows // n_parts, (part + 1) * n_rows // n_parts
        start = first_row
        while start < last_row:
            end = last_row if last_row - start < at_once + 2 * ROWS else start + at_once
            for o in range(first_group * BLOCKS, last_group * BLOCKS, BLOCKS):
                code, t = o * block_codes, start
                while t < end:
                    left = end - t
                    if left > ROWS and end - start >= 2 * ROWS:
                        t = min(t, end - 2 * ROWS)  # rows are computed again, to the same bits, rather than padded
                        for half in range(0, BLOCKS, 2):
                            _two_by_two(codes, code + half * block_codes, block_codes, x, t * n_pairs, n_pairs, sums)
                            write(sums, ROWS, 2, bias, activation, o + half, out_TO[t : t + 2 * ROWS])
                        t += 2 * ROWS
                    else:
                        t = max(start, min(t, end - ROWS))
                        n = min(ROWS, end - t)
                        _one_by_four(codes, code, block_codes, x, t * n_pairs, n_pairs, sums)
                        write(sums, n, BLOCKS, bias, activation, o, out_TO[t : t + n])
                        t += n
            start = end
        amx.release()


@njit(error_model="numpy")
def write(sums, n_tile_rows, n_blocks, bias, activation, first_block, out_TO):  # type: ignore[no-untyped-def]
    """Write the sums of rows and some blocks: sums[row tile, block, row, lane], flat."""
    n_out, flat = out_TO.shape[1], out_TO.reshape(-1)
    is_plain = activation == 0 and len(bias) == 0
    for t in range(len(out_TO)):
        for v in range(n_blocks):
            channel = (first_block + v) * BLOCK
            at = ((t // n_tile_rows * n_blocks + v) * ROWS + t % n_tile_rows) * BLOCK
            if is_plain and channel + BLOCK <= n_out:
                store_sums(sums, at, flat, t * n_out + channel)
            elif channel < n_out:
                finish(sums[at : at + BLOCK], bias, activation, channel, out_TO[t])
