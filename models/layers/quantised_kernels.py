"""Compiles products with weights of 8 and 4 bits, and the rounding of weights to these, for the CPU.

torch's own operators for this are slow for rows of float32, and for more than a few rows. A weight is an integer times
a scale; each group of 32 inputs of an output has its own scale, in bfloat16. A block of outputs (`integer_vectors`) is
read from its first group to its last, once for eight rows with AVX-512, else for four.

Where the processor multiplies pairs of bfloat16 and adds their products (AVX512_BF16), rows of bfloat16 are read as
pairs; where it multiplies whole tiles (AMX), `tile_kernels` does that. Otherwise rows and weights become float32. Sums
are float32, and each row's are formed in the same order in any company.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types

from memory.kernels.cpu.compiled import compiled
from memory.kernels.cpu.numbers import get, put, untyped_intrinsic
from models.layers.finishing import finish_block
from models.layers.integer_vectors import (
    BLOCK,
    F32,
    FLOATS,
    GROUP,
    I8,
    I16,
    I32,
    I64,
    PAIRS,
    ZEROS,
    Emitter,
    has_many_registers,
)

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_ROUNDER = np.float32(12582912.0)
"""1.5 * 2**23: adding it rounds to an integer, of two the even one; subtracting it leaves that integer."""

_DIVISORS = np.array([7.0, 7.25, 7.5, 7.75, 8.0, 8.25, 8.5, 9.0], np.float32)
"""Quotients of a group's largest weight and its scale that are tried for 4 bits."""


def _tile(n_rows: int) -> Any:
    @untyped_intrinsic
    def tile(typing_context, codes, first_code, scales, first_scale, step, x, first_input, x_stride, n_groups, sums):  # type: ignore[no-untyped-def]
        """Set sums[: n_rows * 16] to the sums of rows and a block; not checked.

        Codes of 8 bits are int8, of 4 bits uint8; x is float32, or uint16 for bfloat16, which then comes in pairs. Each
        group has its scales `step` behind those of the group before: 16, or 0 if all have the same.
        """

        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            def pointer(i: int, at: ir.Value, element: ir.Type) -> ir.Value:
                data = context.make_array(signature.args[i])(context, builder, arguments[i]).data
                return builder.bitcast(builder.gep(data, [at]), element.as_pointer())

            _, code_at, _, scale_at, scale_step, _, input_at, stride, groups, _ = arguments
            is_paired = x.dtype == types.uint16
            emitter = Emitter(builder, 8 if codes.dtype == types.int8 else 4, is_paired=is_paired)
            found = _sums(
                emitter, n_rows, pointer(0, code_at, I8), pointer(2, scale_at, I16), scale_step,
                pointer(5, input_at, I32 if is_paired else F32), builder.lshr(stride, I64(1)) if is_paired else stride,
                groups,
            )  # fmt: skip
            for row, vector in enumerate(found):
                builder.store(vector, pointer(9, I64(BLOCK * row), FLOATS), align=4)
            return context.get_dummy_value()

        at = types.int64
        return types.void(codes, at, scales, at, at, x, at, at, at, sums), codegen

    return tile


def _sums(
    emitter: Emitter, n_rows: int, codes: ir.Value, scales: ir.Value, scale_step: ir.Value, x: ir.Value,
    x_stride: ir.Value, n_groups: ir.Value,
) -> list[ir.Value]:  # fmt: skip
    """Return a vector of a block's sums for each row.

    `codes`, `scales` and `x` point to the block's first and the first row's; `x` to float32, or to pairs, which
    `x_stride` counts. There is at least one group.
    """
    b, before = emitter.b, emitter.b.block
    loop, end = b.append_basic_block("groups"), b.append_basic_block("end")
    b.branch(loop)
    b.position_at_end(loop)
    group = b.phi(I64)
    group.add_incoming(I64(0), before)
    totals = [b.phi(FLOATS) for _ in range(n_rows)]
    for total in totals:
        total.add_incoming(ZEROS, before)
    per_pair = 1 if emitter.is_paired else 2
    rows = [b.gep(x, [b.add(b.mul(x_stride, I64(row)), b.mul(group, I64(per_pair * PAIRS)))]) for row in range(n_rows)]
    parts = [ZEROS] * n_rows
    for pair, weights in enumerate(
        emitter.weights(b.gep(codes, [b.mul(group, I64(GROUP * BLOCK * emitter.n_bits // 8))]))
    ):
        for i, row in enumerate(rows):
            for k, weight in enumerate(weights):
                one = b.load(b.gep(row, [I64(pair * per_pair + k)]), align=2 if emitter.is_paired else 4)
                parts[i] = emitter.multiply_add(weight, emitter.in_every_lane(one), parts[i])
    scale = emitter.scales(b.gep(scales, [b.mul(group, scale_step)]))
    sums = [emitter.fma(part, scale, total) for part, total in zip(parts, totals, strict=True)]
    following = b.add(group, I64(1))
    group.add_incoming(following, loop)
    for total, value in zip(totals, sums, strict=True):
        total.add_incoming(value, loop)
    b.cbranch(b.icmp_signed("<", following, n_groups), loop, end)
    b.position_at_end(end)
    return sums


_MOST_ROWS = 8 if has_many_registers() else 4
"""Limits the rows of a tile to those whose sums stay in registers; sums that go to memory take a third longer."""

_tile_most, _tile_4, _tile_2, _tile_1 = map(_tile, (_MOST_ROWS, 4, 2, 1))


@compiled(parallel=True, error_model="numpy")
def product(codes, scales, x_TI, bias, activation, n_parts, out_TO):  # type: ignore[no-untyped-def]
    """Set out = activation(x W^T + bias).

    Args:
        x_TI: rows, of a multiple of 32 inputs.
        bias: (outputs,) or empty.
        activation: its number in `finishing.ACTIVATIONS`.
        n_parts: into how many parts the blocks are divided, one for each thread.
    """
    n_rows, n_out = out_TO.shape
    n_in, x, out = x_TI.shape[1], x_TI.reshape(-1), out_TO.reshape(-1)
    n_blocks, n_groups = (n_out + BLOCK - 1) // BLOCK, n_in // GROUP
    block_codes, block_scales = len(codes) // n_blocks, len(scales) // n_blocks
    step = BLOCK if block_scales > BLOCK else 0
    for part in prange(n_parts):
        sums = np.empty(_MOST_ROWS * BLOCK, np.float32)
        for o in range(part * n_blocks // n_parts, (part + 1) * n_blocks // n_parts):
            code, scale = o * block_codes, o * block_scales
            t = 0
            while t < n_rows:
                left, at = n_rows - t, t * n_in
                if left >= _MOST_ROWS:
                    n = _MOST_ROWS
                    _tile_most(codes, code, scales, scale, step, x, at, n_in, n_groups, sums)
                elif left >= 4:
                    n = 4
                    _tile_4(codes, code, scales, scale, step, x, at, n_in, n_groups, sums)
                elif left >= 2:
                    n = 2
                    _tile_2(codes, code, scales, scale, step, x, at, n_in, n_groups, sums)
                else:
                    n = 1
                    _tile_1(codes, code, scales, scale, step, x, at, n_in, n_groups, sums)
                finish_block(sums, 0, n, bias, activation, o * BLOCK, out, t * n_out + o * BLOCK, n_out)
                t += n


@compiled(parallel=True, error_model="numpy")
def round_to_codes(weight, n_out, n_in, n_bits, n_parts, codes, scales):  # type: ignore[no-untyped-def]
    """Fill codes (uint8) and scales from a flat weight of float32 or 16 bits; what lies beyond its edges is zero.

    There are 16 scales for each group of a block, or for each block; the latter with 8 bits only.

    8 bits: the scale is the group's largest weight / 127. 4 bits: of some scales the one with the least squared error
    is taken, and what minimises it for the integers that come out. Sixteen outputs are rounded side by side, so their
    sums have the same order on every processor.
    """
    n_blocks, n_groups = (n_out + BLOCK - 1) // BLOCK, (n_in + GROUP - 1) // GROUP
    is_by_row = len(scales) == n_blocks * BLOCK
    least, most = np.float32(-127.0 if n_bits == 8 else -8.0), np.float32(127.0 if n_bits == 8 else 7.0)
    for part in prange(n_parts):
        group, scale = np.empty((GROUP, BLOCK), np.float32), np.empty(BLOCK, np.float32)
        largest, spoilt = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        for o in range(part * n_blocks // n_parts, (part + 1) * n_blocks // n_parts):
            largest[:], spoilt[:] = _ZERO, _ZERO
            if is_by_row:
                for g in range(n_groups):
                    _fill(weight, n_out, n_in, o * BLOCK, g * GROUP, group)
                    _find_largest(largest, spoilt, group)
            for g in range(n_groups):
                _fill(weight, n_out, n_in, o * BLOCK, g * GROUP, group)
                if not is_by_row:
                    largest[:], spoilt[:] = _ZERO, _ZERO
                    _find_largest(largest, spoilt, group)
                _choose_scale(group, largest, spoilt, n_bits, scale)
                first = (o * n_groups + g) * BLOCK
                at = o * BLOCK if is_by_row else first
                for lane in range(BLOCK):
                    put(scales, at + lane, scale[lane])
                    scale[lane] = get(scales, at + lane)
                    scale[lane] = _ONE / scale[lane] if scale[lane] != _ZERO else _ZERO
                for e in range(GROUP):
                    _round_(group[e], scale, least, most)
                _write(codes, n_bits, first * GROUP, group)


@njit(error_model="numpy")
def _fill(weight, n_out, n_in, first_output, first_input, group):  # type: ignore[no-untyped-def]
    """Set group[input, lane] to a block's weights."""
    group[:] = _ZERO
    n = min(GROUP, n_in - first_input)
    for lane in range(min(BLOCK, n_out - first_output)):
        at = (first_output + lane) * n_in + first_input
        own = weight[at : at + n]
        for e in range(n):
            group[e, lane] = get(own, e)


@njit(error_model="numpy")
def _find_largest(largest, spoilt, group):  # type: ignore[no-untyped-def]
    for e in range(GROUP):
        _find_largest_(largest, spoilt, group[e])


@njit(error_model="numpy")
def _choose_scale(group, largest, spoilt, n_bits, scale):  # type: ignore[no-untyped-def]
    """Set the scale of each lane; NaN where a weight is NaN or infinite."""
    if n_bits == 8:
        for lane in range(BLOCK):
            scale[lane] = largest[lane] / np.float32(127.0)
    else:
        _search_scale(group, largest, scale)
    for lane in range(BLOCK):
        scale[lane] += spoilt[lane]


@njit(error_model="numpy")
def _search_scale(group, largest, scale):  # type: ignore[no-untyped-def]
    """Set the scale of each lane for 4 bits: of those from `_DIVISORS` the one with the least squared error."""
    scale[:] = _ZERO
    best = np.zeros(BLOCK, np.float32)
    inverse, both, squares = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for divisor in _DIVISORS:
        for lane in range(BLOCK):
            inverse[lane] = -divisor / largest[lane] if largest[lane] != _ZERO else _ZERO
        both[:], squares[:] = _ZERO, _ZERO
        for e in range(GROUP):
            _add_products_(both, squares, group[e], inverse)
        for lane in range(BLOCK):
            gain = both[lane] * both[lane] / squares[lane]
            if gain > best[lane]:  # not where all weights are zero, and it is NaN
                best[lane], scale[lane] = gain, both[lane] / squares[lane]


@njit(error_model="numpy")
def _find_largest_(largest, spoilt, row):  # type: ignore[no-untyped-def]
    for lane in range(len(row)):
        x = row[lane]
        largest[lane] = x if abs(x) > abs(largest[lane]) else largest[lane]
        spoilt[lane] += x * _ZERO


@njit(error_model="numpy")
def _add_products_(both, squares, row, factor):  # type: ignore[no-untyped-def]
    """Add what each lane's integer gives for the error of its scale."""
    for lane in range(len(row)):
        x = _nearest(row[lane] * factor[lane], -np.float32(8.0), np.float32(7.0))
        both[lane] += row[lane] * x
        squares[lane] += x * x


@njit(error_model="numpy")
def _round_(x, factor, least, most):  # type: ignore[no-untyped-def]
    """Set x to the integers that are nearest to x * factor."""
    for lane in range(len(x)):
        x[lane] = _nearest(x[lane] * factor[lane], least, most)


@njit(inline="always", error_model="numpy")
def _nearest(x, least, most):  # type: ignore[no-untyped-def]
    x = least if x < least else x
    x = most if x > most else x
    return (x + _ROUNDER) - _ROUNDER


@njit(error_model="numpy")
def _write(codes, n_bits, first, integers):  # type: ignore[no-untyped-def]
    """Write the integers of a block's group, whose first code, counted in weights, is `first`."""
    for e in range(GROUP):
        pair, row = e // 2, integers[e]
        if n_bits == 8:
            at = first + 2 * BLOCK * pair
            own = codes[at : at + 2 * BLOCK]
            for lane in range(BLOCK):
                own[2 * lane + e % 2] = np.uint8(np.int8(row[lane]))
        else:
            at = first // 2 + (pair // 4) * 4 * BLOCK
            own, place = codes[at : at + 4 * BLOCK], 2 * (e % 2) + (pair % 4) // 2
            for lane in range(BLOCK):
                code = np.uint8(row[lane] + np.float32(8.0))
                own[4 * lane + place] = code if pair % 2 == 0 else own[4 * lane + place] | (code << np.uint8(4))
