"""Compiles products with weights of 2 to 8 bits for the CPU.

torch's own operators for such weights are slow for rows of float32, and for more than a few rows. A block of outputs
(`models.weights.layouts`) is read from its first group to its last, once for twelve rows with AVX-512, or for four rows
without. The sum of each group is multiplied by its scale. A minimum is multiplied by the sum of the group's inputs.

How rows are read depends on the processor:

- If it multiplies pairs of bfloat16 and adds their products (AVX512_BF16), rows of bfloat16 are read as pairs.
- If it adds products of integers (AVX512_VNNI), `integer_row_kernels` multiplies few rows.
- If it multiplies whole tiles (AMX), `integer_tile_kernels` multiplies all rows.
- Otherwise rows and weights become float32.

Sums are float32, and each row's sums are formed in the same order in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types

from hybridmem.memory.kernels.cpu.parts import compiled, get, has_many_registers, subroutine, untyped_intrinsic
from hybridmem.models.products import amx
from hybridmem.models.products.epilogue import block_epilogue
from hybridmem.models.products.integer_vectors import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    ZEROS,
    Emitter,
    in_every_lane,
    layout_of_codes,
)
from hybridmem.models.products.row_ranges import in_range, multiply_back
from hybridmem.models.products.tile_kernels import add_while
from hybridmem.models.weights.layouts import BLOCK, GROUP, PAIRS


def _tile(n_rows: int) -> Any:
    @untyped_intrinsic
    def tile(
        typing_context, codes, first_code, scales, first_scale, x, first_input, x_stride, row_sums, first_sum, n_groups,
        sums,
    ):  # fmt: skip
        """Set sums[: n_rows * 16] to the sums of rows and a block. Nothing is checked.

        x is float32, or pairs of bfloat16 as uint16. `row_sums` is the result of `sums_of_rows`.
        """

        def codegen(context, builder, signature, arguments):
            def pointer(i: int, at: ir.Value, element: ir.Type) -> ir.Value:
                data = context.make_array(signature.args[i])(context, builder, arguments[i]).data
                return builder.bitcast(builder.gep(data, [at]), element.as_pointer())

            _, code_at, _, scale_at, _, input_at, stride, _, sum_at, groups, _ = arguments
            is_paired = x.dtype == types.uint16
            found = _Sums(
                Emitter(builder, layout_of_codes(codes), is_paired=is_paired), n_rows,
                pointer(0, code_at, I8), pointer(2, scale_at, I16), pointer(4, input_at, I32 if is_paired else F32),
                builder.lshr(stride, I64(1)) if is_paired else stride, pointer(7, sum_at, F32), groups,
            ).emit()  # fmt: skip
            for row, vector in enumerate(found):
                builder.store(vector, pointer(10, I64(BLOCK * row), FLOATS), align=4)
            return context.get_dummy_value()

        at = types.int64
        return types.void(codes, at, scales, at, x, at, at, row_sums, at, at, sums), codegen

    return tile


@dataclass
class _Sums:
    """Emits a vector of a block's sums for each row.

    `codes`, `scales`, `x` and `row_sums` point to the data of the block and of the first row. `x` points to float32 or
    to pairs, in which `x_stride` is counted. There is at least one group.
    """

    emitter: Emitter
    n_rows: int
    codes: ir.Value
    scales: ir.Value
    x: ir.Value
    x_stride: ir.Value
    row_sums: ir.Value
    n_groups: ir.Value

    def emit(self) -> list[ir.Value]:
        b = self.emitter.b
        _, totals = add_while(b, self._add, I64(0), self.n_groups, 1, [ZEROS] * self.n_rows)
        return totals

    def _add(self, group: ir.Value, _: int, totals: list[ir.Value]) -> list[ir.Value]:
        b, emitter, layout = self.emitter.b, self.emitter, self.emitter.layout
        per_pair = 1 if emitter.is_paired else 2
        first = b.mul(group, I64(per_pair * PAIRS))
        rows = [b.gep(self.x, [b.add(b.mul(self.x_stride, I64(row)), first)]) for row in range(self.n_rows)]
        scales = emitter.scales(self.scales, group)
        parts, codes = [ZEROS] * self.n_rows, b.gep(self.codes, [b.mul(group, I64(layout.code_bytes))])
        for line in range(0, layout.code_bytes, 64):
            amx.prefetch(b, b.gep(codes, [I64(_AHEAD_BYTES + line)]))
        for pair, weights in enumerate(emitter.weights(codes)):
            for i, row in enumerate(rows):
                for k, weight in enumerate(weights):
                    one = b.load(b.gep(row, [I64(pair * per_pair + k)]), align=2 if emitter.is_paired else 4)
                    parts[i] = emitter.multiply_add(weight, emitter.in_every_lane(one), parts[i])
            if (pair + 1) % (PAIRS // len(scales)) == 0:
                half = (pair + 1) * len(scales) // PAIRS - 1
                totals = self._scaled(group, half, scales, parts, totals)
                parts = [ZEROS] * self.n_rows
        return totals

    def _scaled(
        self, group: ir.Value, half: int, scales: list[Any], parts: list[ir.Value], totals: list[ir.Value]
    ) -> list[ir.Value]:
        """Return totals plus the sums of the inputs that share a scale."""
        b, (scale, minimum), n = self.emitter.b, scales[half], len(scales)
        totals = [self.emitter.fma(part, scale, total) for part, total in zip(parts, totals, strict=True)]
        if minimum is None:
            return totals
        found = []
        for row, total in enumerate(totals):
            at = b.mul(b.add(b.mul(self.n_groups, I64(row)), group), I64(n))
            own = in_every_lane(b, b.load(b.gep(self.row_sums, [b.add(at, I64(half))]), align=4))
            found.append(self.emitter.fma(own, minimum, total))
        return found


_AHEAD_BYTES = 4096
"""How many bytes ahead weights are prefetched, because the first rows that read them would otherwise wait."""

_MOST_ROWS, _MANY_ROWS = (12, 8) if has_many_registers() else (4, 4)
"""The most rows of a tile whose sums stay in registers. Sums that go to memory take a third longer."""

_tile_most, _tile_many, _tile_4, _tile_2, _tile_1 = map(_tile, (_MOST_ROWS, _MANY_ROWS, 4, 2, 1))


@compiled(parallel=True)
def product(codes, scales, x_TI, bias, activation, n_parts, out_TO):
    """Set out = activation(x W^T + bias).

    Args:
        x_TI: rows, of a multiple of 32 inputs.
        bias: (outputs,) or empty.
        activation: its number in `epilogue.ACTIVATIONS`.
        n_parts: how many parts the blocks are divided into, one for each thread.
    """
    n_rows, n_out = out_TO.shape
    n_in, out = x_TI.shape[1], out_TO.reshape(-1)
    if n_rows == 0:
        return
    x, factors = in_range(x_TI.reshape(-1), n_rows, n_in)
    row_sums = sums_of_rows(codes, x, n_rows, n_in)
    for part in prange(n_parts):
        multiply_part(codes, scales, x, row_sums, factors, n_in, bias, activation, part, n_parts, out, n_rows, n_out)


@untyped_intrinsic
def _summed_inputs(typing_context, codes):
    """Return how many inputs of a row are summed for the minima of weights, or 0 if the weights have no minima."""
    n = layout_of_codes(codes).summed_inputs

    def codegen(context, builder, signature, arguments):
        return I64(n)

    return types.int64(codes), codegen


@subroutine()
def sums_of_rows(codes, x, n_rows, n_in):
    """Return the sums of each row's inputs that share a minimum, or none if the weights have no minima."""
    n = _summed_inputs(codes)
    if n == 0:
        return np.empty(0, np.float32)
    found = np.empty(n_rows * n_in // n, np.float32)
    for i in range(len(found)):
        total = np.float32(0.0)
        for e in range(i * n, (i + 1) * n):
            total += get(x, e)
        found[i] = total
    return found


@subroutine()
def multiply_part(codes, scales, x, row_sums, factors, n_in, bias, activation, part, n_parts, out, n_rows, n_out):
    """Multiply all rows, from `row_ranges.in_range`, by the weights of one part of the outputs."""
    n_blocks, n_groups = (n_out + BLOCK - 1) // BLOCK, n_in // GROUP
    block_codes, block_scales, per_row = len(codes) // n_blocks, len(scales) // n_blocks, len(row_sums) // n_rows
    sums = np.empty(_MOST_ROWS * BLOCK, np.float32)
    for o in range(part * n_blocks // n_parts, (part + 1) * n_blocks // n_parts):
        code, scale = o * block_codes, o * block_scales
        t = 0
        while t < n_rows:
            left, at, own = n_rows - t, t * n_in, t * per_row
            if left >= _MOST_ROWS:
                n = _MOST_ROWS
                _tile_most(codes, code, scales, scale, x, at, n_in, row_sums, own, n_groups, sums)
            elif left >= _MANY_ROWS:
                n = _MANY_ROWS
                _tile_many(codes, code, scales, scale, x, at, n_in, row_sums, own, n_groups, sums)
            elif left >= 4:
                n = 4
                _tile_4(codes, code, scales, scale, x, at, n_in, row_sums, own, n_groups, sums)
            elif left >= 2:
                n = 2
                _tile_2(codes, code, scales, scale, x, at, n_in, row_sums, own, n_groups, sums)
            else:
                n = 1
                _tile_1(codes, code, scales, scale, x, at, n_in, row_sums, own, n_groups, sums)
            multiply_back(sums, 0, n, factors, t)
            block_epilogue(sums, 0, n, bias, activation, o * BLOCK, out, t * n_out + o * BLOCK, n_out)
            t += n
