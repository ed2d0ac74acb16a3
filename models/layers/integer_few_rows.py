"""Emits the sums of one or two rows with weights of 8 and 4 bits in vectors, to the bits that tiles (`amx`) give.

A tile of one row takes as long as one of sixteen: its weights are written to the cache and loaded again. Here they go
from memory through registers alone, so that a step of one sequence waits for little more than the weights' bytes.

TDPBF16PS adds the products of all pairs' first inputs and those of their second ones apart, each in float32 with one
rounding, and the two sums at last; so does this. Denormal inputs count as zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from memory.kernels.cpu.numbers import untyped_intrinsic
from models.layers import amx
from models.layers.amx import I64
from models.layers.integer_vectors import BLOCK, F32, FLOATS, GROUP, I8, I16, ZEROS, Emitter

MOST_ROWS = 2
"""The most rows of a product for which vectors were measured to be faster than tiles."""

AHEAD_BYTES = 2048
"""The distance at which weights are prefetched, ahead of those that are being read."""


def _sums_of(n_rows: int) -> Any:
    @untyped_intrinsic
    def sums_of(  # type: ignore[no-untyped-def]
        typing_context, codes, first_code, n_groups, scales, first_scale, rows, sums
    ):
        """Multiply rows of float32 by a block of 16 outputs, and store 16 sums a row in `sums`; not checked.
        Each group of inputs, of which there is at least one, counts times its scale.
        """

        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            b, emitter = builder, Emitter(builder, 8 if codes.dtype == types.int8 else 4, is_paired=False)

            def pointer(i: int, at: ir.Value, element: ir.Type) -> ir.Value:
                return b.bitcast(amx.pointer(context, b, signature, arguments, i, at), element.as_pointer())

            n_codes = GROUP * BLOCK * emitter.n_bits // 8
            source, scale_at, before = pointer(0, arguments[1], I8), pointer(3, arguments[4], I16), b.block
            firsts = [pointer(5, b.mul(arguments[2], I64(GROUP * row)), F32) for row in range(n_rows)]
            loop, end = b.append_basic_block("groups"), b.append_basic_block("end")
            b.branch(loop)
            b.position_at_end(loop)
            group, totals = b.phi(I64), [b.phi(FLOATS) for _ in firsts]
            own = b.gep(source, [b.mul(group, I64(n_codes))])
            for line in range(n_codes // 64):
                amx.prefetch(b, b.gep(own, [I64(AHEAD_BYTES + 64 * line)]))
            inputs = [b.gep(first, [b.mul(group, I64(GROUP))]) for first in firsts]
            parts = [[ZEROS, ZEROS] for _ in firsts]
            for pair, weights in enumerate(emitter.weights(own)):
                for k, weight in enumerate(weights):
                    for part, x in zip(parts, inputs, strict=True):
                        one = emitter.in_every_lane(b.load(b.gep(x, [I64(2 * pair + k)]), align=4))
                        part[k] = emitter.fma(weight, one, part[k])
            scale = emitter.scales(b.gep(scale_at, [b.mul(group, I64(BLOCK))]))
            found = [emitter.fma(b.fadd(*part), scale, total) for part, total in zip(parts, totals, strict=True)]
            following = b.add(group, I64(1))
            group.add_incoming(I64(0), before)
            group.add_incoming(following, loop)
            for total, value in zip(totals, found, strict=True):
                total.add_incoming(ZEROS, before)
                total.add_incoming(value, loop)
            b.cbranch(b.icmp_signed("<", following, arguments[2]), loop, end)
            b.position_at_end(end)
            for row, value in enumerate(found):
                b.store(value, pointer(6, I64(BLOCK * row), FLOATS), align=4)
            return context.get_dummy_value()

        at = types.int64
        return types.void(codes, at, at, scales, at, rows, sums), codegen

    return sums_of


sums_of_one, sums_of_two = _sums_of(1), _sums_of(2)


@njit(error_model="numpy")
def as_floats(pairs):  # type: ignore[no-untyped-def]
    """Convert pairs of bfloat16 to an array of float32, in their order; denormal numbers become zero."""
    row = np.empty(2 * len(pairs), np.float32)
    bits = row.view(np.uint32)
    for i in range(len(pairs)):
        first, second = np.uint32(pairs[i] << np.uint32(16)), np.uint32(pairs[i] & np.uint32(0xFFFF0000))
        bits[2 * i] = first if first & np.uint32(0x7F800000) else np.uint32(0)
        bits[2 * i + 1] = second if second & np.uint32(0x7F800000) else np.uint32(0)
    return row
