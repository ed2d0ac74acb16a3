"""Compiles products with weights of 8 and 4 bits for the CPU.

torch's own operators for this are slow for rows of float32, and for more than a few rows. A weight is an integer times
a scale; each group of 32 inputs of an output has its own scale, in bfloat16. A block of outputs (`integer_vectors`) is
read from its first group to its last, once for eight rows with AVX-512, else for four.

Where the processor multiplies pairs of bfloat16 and adds their products (AVX512_BF16), rows of bfloat16 are read as
pairs; where it adds products of integers (AVX512_VNNI), `integer_row_kernels` takes few rows, and where it multiplies
whole tiles (AMX), `integer_tile_kernels` all. Otherwise rows and weights become float32. Sums are float32, and each
row's are formed in the same order in any company.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types

from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.numbers import untyped_intrinsic
from hybridmem.models.products.epilogue import block_epilogue
from hybridmem.models.products.integer_vectors import (
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
from hybridmem.models.products.row_ranges import in_range, multiply_back


def _tile(n_rows: int) -> Any:
    @untyped_intrinsic
    def tile(typing_context, codes, first_code, scales, first_scale, step, x, first_input, x_stride, n_groups, sums):
        """Set sums[: n_rows * 16] to the sums of rows and a block; not checked.

        Codes of 8 bits are int8, of 4 bits uint8; x is float32, or uint16 for bfloat16, which then comes in pairs. Each
        group has its scales `step` behind those of the group before: 16, or 0 if all have the same.
        """

        def codegen(context, builder, signature, arguments):
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
def product(codes, scales, x_TI, bias, activation, n_parts, out_TO):
    """Set out = activation(x W^T + bias).

    Args:
        x_TI: rows, of a multiple of 32 inputs.
        bias: (outputs,) or empty.
        activation: its number in `epilogue.ACTIVATIONS`.
        n_parts: into how many parts the blocks are divided, one for each thread.
    """
    n_rows, n_out = out_TO.shape
    n_in, out = x_TI.shape[1], out_TO.reshape(-1)
    x, factors = in_range(x_TI.reshape(-1), n_rows, n_in)
    for part in prange(n_parts):
        multiply_part(codes, scales, x, factors, n_in, bias, activation, part, n_parts, out, n_rows, n_out)


@njit(error_model="numpy")
def multiply_part(codes, scales, x, factors, n_in, bias, activation, part, n_parts, out, n_rows, n_out):
    """Multiply all rows, from `row_ranges.in_range`, by the weights of one part of the outputs."""
    n_blocks, n_groups = (n_out + BLOCK - 1) // BLOCK, n_in // GROUP
    block_codes, block_scales = len(codes) // n_blocks, len(scales) // n_blocks
    step = BLOCK if block_scales > BLOCK else 0
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
            multiply_back(sums, 0, n, factors, t)
            block_epilogue(sums, 0, n, bias, activation, o * BLOCK, out, t * n_out + o * BLOCK, n_out)
            t += n
