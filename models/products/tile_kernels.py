"""Compiles products with weights in bfloat16 for processors that multiply tiles (`amx`).

The layout is that of `blocked_kernels`: 16 pairs of inputs of a block's 16 outputs are contiguous, and form a tile.
Sums stay in the registers from the first input to the last. A row has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import prange, types

from hybridmem.memory.kernels.cpu.parts import array_at, compiled, element_at, subroutine, untyped_intrinsic
from hybridmem.models.products import amx
from hybridmem.models.products.amx import I64, ROWS, ROWS_AT, TILE_BYTES, WEIGHTS_AT
from hybridmem.models.products.blocked_kernels import BLOCKS
from hybridmem.models.products.epilogue import Rows, block_epilogue, two_block_epilogue
from hybridmem.models.weights.layouts import BLOCK, PAIRS

CACHED_ROW_BYTES = 1 << 20
"""The bytes of rows that are multiplied by all weights of a thread before the next rows.

They stay in the second-level cache.
"""

_SUMS = 4 * ROWS * BLOCK
"""The number of sums of four tiles."""

_LINE_BYTES = 64

_AHEAD_BYTES, _LINES = 2048, 16
"""How many bytes ahead weights are prefetched if they are read once, and how many cache lines a tile has.

This saves a tenth of the time of products of few rows.
"""

_ASKING = 8
"""During how many pairs of tiles of rows the next two blocks of weights are prefetched, an eighth of them each time."""


@untyped_intrinsic
def _one_by_four(typing_context, codes, first_code, block_codes, x, first_pair, n_pairs, sums, at):
    """Set sums[at :], of four blocks with 16 x 16 each, to the sums of a tile of rows. Nothing is checked.

    Codes and x are uint32 arrays of pairs. A block has `block_codes` pairs, and a row `n_pairs`.
    """

    def codegen(context, builder, signature, arguments):
        b = builder
        weights, rows = (amx.pointer(context, b, signature, arguments, i, arguments[i + 1]) for i in (0, 3))
        block_bytes, row_bytes = (b.mul(arguments[i], I64(4)) for i in (2, 5))
        for tile in range(BLOCKS):
            amx.zero(b, tile)

        def add_products(k: ir.Value) -> None:
            amx.load(b, ROWS_AT, b.gep(rows, [b.mul(k, I64(4 * PAIRS))]), row_bytes)
            for v in range(BLOCKS):
                at = b.add(b.mul(k, I64(TILE_BYTES)), b.mul(block_bytes, I64(v)))
                for line in range(_LINES):
                    amx.prefetch(b, b.gep(weights, [b.add(at, I64(_AHEAD_BYTES + TILE_BYTES // _LINES * line))]))
                amx.load_weights(b, WEIGHTS_AT + v % 2, b.gep(weights, [at]))
                amx.multiply_add(b, v, ROWS_AT, WEIGHTS_AT + v % 2)

        repeat(b, b.udiv(arguments[5], I64(PAIRS)), add_products)
        out = amx.pointer(context, b, signature, arguments, 6, arguments[7])
        for tile in range(BLOCKS):
            amx.store(b, tile, b.gep(out, [I64(TILE_BYTES * tile)]))
        return context.get_dummy_value()

    i = types.int64
    return types.void(codes, i, i, x, i, i, sums, i), codegen


@untyped_intrinsic
def _two_by_two(
    typing_context, codes, first_code, block_codes, x, first_pair, n_pairs, sums, at, ahead, done_at, n_done, bias,
    activation, channel, out, place, n_out,
):  # fmt: skip
    """Set sums[at :], of two blocks with 32 x 16 each, to the sums of two tiles of rows. Nothing is checked.

    Meanwhile it writes the results of `n_done` rows, at most 32, whose sums are at `done_at`: each product keeps the
    unit for tiles busy for sixteen cycles, in which the processor is otherwise idle. It also prefetches the codes from
    `ahead` on, four cache lines at each step.
    """

    def codegen(context, builder, signature, arguments):
        b = builder
        weights, rows = (amx.pointer(context, b, signature, arguments, i, arguments[i + 1]) for i in (0, 3))
        block_bytes, row_bytes = (b.mul(arguments[i], I64(4)) for i in (2, 5))
        wanted = amx.pointer(context, b, signature, arguments, 0, arguments[8])
        n_done, done_at = arguments[10], element_at(context, b, sums, arguments[6], arguments[9])
        results = Rows(context, b, signature, arguments, 11, (done_at, 2 * ROWS * BLOCK, 2))
        for tile in range(4):
            amx.zero(b, tile)

        def add_products(k: ir.Value) -> None:
            for r in range(2):
                at = b.add(b.mul(k, I64(4 * PAIRS)), b.mul(row_bytes, I64(ROWS * r)))
                amx.load(b, ROWS_AT + r, b.gep(rows, [at]), row_bytes)
                for v in range(2):
                    if r == 0:
                        at = b.add(b.mul(k, I64(TILE_BYTES)), b.mul(block_bytes, I64(v)))
                        amx.load_weights(b, WEIGHTS_AT + v, b.gep(weights, [at]))
                        for line in range(2):
                            at = b.add(b.mul(k, I64(4 * _LINE_BYTES)), I64(_LINE_BYTES * (2 * v + line)))
                            amx.prefetch(b, b.gep(wanted, [at]))
                    amx.multiply_add(b, 2 * v + r, ROWS_AT + r, WEIGHTS_AT + v)
            row = b.mul(k, I64(2))
            with b.if_then(b.icmp_signed("<", row, n_done)):
                results.write(row)
                results.write(b.add(row, I64(1)))

        n_steps = b.udiv(arguments[5], I64(PAIRS))
        repeat(b, n_steps, add_products)
        n_written = b.mul(n_steps, I64(2))
        with b.if_then(b.icmp_signed("<", n_written, n_done)):
            repeat(b, b.sub(n_done, n_written), lambda row: results.write(b.add(n_written, row)))
        own = amx.pointer(context, b, signature, arguments, 6, arguments[7])
        for tile in range(4):
            amx.store(b, tile, b.gep(own, [I64(TILE_BYTES * tile)]))
        return context.get_dummy_value()

    i = types.int64
    return types.void(codes, i, i, x, i, i, sums, i, i, i, i, bias, i, i, out, i, i), codegen


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


def add_while(
    b: ir.IRBuilder, add: Callable[[ir.Value, int, list[ir.Value]], list[ir.Value]], first: ir.Value, end: ir.Value,
    n: int, totals: list[ir.Value],
) -> tuple[ir.Value, list[ir.Value]]:  # fmt: skip
    """Emit a loop that adds n groups at once as long as at least n are left before `end`.

    `add` emits totals plus the sums of n groups from a given group on. The loop returns the first remaining group, and
    the totals.
    """
    check, body, after = (b.append_basic_block(name) for name in ("check", "groups", "after"))
    before = b.block
    b.branch(check)
    b.position_at_end(check)
    group = b.phi(I64)
    group.add_incoming(first, before)
    own = [b.phi(total.type) for total in totals]
    for phi, total in zip(own, totals, strict=True):
        phi.add_incoming(total, before)
    following = b.add(group, I64(n))
    b.cbranch(b.icmp_signed("<=", following, end), body, after)
    b.position_at_end(body)
    for phi, total in zip(own, add(group, n, list(own)), strict=True):
        phi.add_incoming(total, b.block)
    group.add_incoming(following, b.block)
    b.branch(check)
    b.position_at_end(after)
    return group, list(own)


@compiled(parallel=True)
def product(codes, x_at, n_rows, n_pairs, shape, bias, activation, n_parts, out_at, n_out, like):
    """Set out = activation(x W^T + bias), with weights in bfloat16.

    Args:
        shape: the result of `amx.shape` for the number of rows, at least one.
        others: as for `blocked_kernels.product`.
    """
    x, block_codes = array_at(x_at, n_rows * n_pairs, codes), n_pairs * BLOCK
    out = array_at(out_at, n_rows * n_out, like)
    n_groups = len(codes) // (block_codes * BLOCKS)
    # There are so few outputs that rows are divided among threads.
    divides_rows = n_groups < 4 * n_parts and n_rows >= 2 * ROWS * n_parts
    at_once = max(2 * ROWS, CACHED_ROW_BYTES // (4 * n_pairs))
    for part in prange(n_parts):
        amx.configure(shape)
        sums = amx.aligned(3 * _SUMS)  # Two pairs of tiles alternate, and the third part is for the remaining rows.
        turn, n_done, done_channel, done_row = 0, 0, 0, 0
        first_group, last_group = part * n_groups // n_parts, (part + 1) * n_groups // n_parts
        first_row, last_row = 0, n_rows
        if divides_rows:
            first_group, last_group = 0, n_groups
            first_row, last_row = part * n_rows // n_parts, (part + 1) * n_rows // n_parts
        start = first_row
        while start < last_row:
            end = last_row if last_row - start < at_once + 2 * ROWS else start + at_once
            n_pairs_of_tiles = (end - start) // (2 * ROWS)
            if end - start - n_pairs_of_tiles * 2 * ROWS > ROWS and n_pairs_of_tiles > 0:
                # Some rows are computed twice, with the same bits, because padding would be slower.
                n_pairs_of_tiles += 1
            for o in range(first_group * BLOCKS, last_group * BLOCKS, BLOCKS):
                for half in range(0, BLOCKS, 2):
                    code, channel = (o + half) * block_codes, (o + half) * BLOCK
                    for i in range(n_pairs_of_tiles):
                        t = min(start + i * 2 * ROWS, end - 2 * ROWS)
                        ahead = code + (2 * block_codes + i * 4 * n_pairs if i < _ASKING else 0)
                        _two_by_two(
                            codes, code, block_codes, x, t * n_pairs, n_pairs, sums, turn * _SUMS, ahead,
                            (1 - turn) * _SUMS, n_done, bias, activation, done_channel, out,
                            done_row * n_out + done_channel, n_out,
                        )  # fmt: skip
                        turn, n_done, done_channel, done_row = 1 - turn, 2 * ROWS, channel, t
                t = start + n_pairs_of_tiles * 2 * ROWS
                while t < end:
                    t = max(start, min(t, end - ROWS))
                    n = min(ROWS, end - t)
                    _one_by_four(codes, o * block_codes, block_codes, x, t * n_pairs, n_pairs, sums, 2 * _SUMS)
                    for half in range(0, BLOCKS, 2):
                        at, channel = 2 * _SUMS + half * ROWS * BLOCK, (o + half) * BLOCK
                        two_block_epilogue(sums, at, n, bias, activation, channel, out, t * n_out + channel, n_out)
                    t += n
            start = end
        _epilogue_of_tiles(sums, (1 - turn) * _SUMS, n_done, bias, activation, done_channel, out, done_row, n_out)
        amx.release()


@subroutine()
def _epilogue_of_tiles(sums, at, n_rows, bias, activation, channel, out, row, n_out):
    """Write the results of the pair of tiles that a thread multiplied last."""
    for v in range(2):
        own = channel + v * BLOCK
        block_epilogue(sums, at + v * 2 * ROWS * BLOCK, n_rows, bias, activation, own, out, row * n_out + own, n_out)
