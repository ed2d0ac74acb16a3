"""Decodes rows that a storage keeps into floats, inside of the attention kernel on the GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hybridmem.memory.kernels.signature import FoldedRows

NOT_FOLDED = -1


def constants(folded: FoldedRows | None) -> dict[str, int]:
    """Return constants for the kernel: bits of a code, rows of a block, rows of scales, and scales per row.
    Bits are 0 for float8, and NOT_FOLDED for no rows.
    """
    if folded is None:
        return {"BITS": NOT_FOLDED, "BLOCK_ROWS": 1, "K_ROWS": 1, "K_SCALES": 1, "V_ROWS": 1, "V_SCALES": 1}
    half = len(folded.shapes) // 2
    (k_rows, k_scales), (v_rows, v_scales) = (
        part[1][1:] if half > 1 else (1, 1) for part in (folded.shapes[:half], folded.shapes[half:])
    )
    return {
        "BITS": folded.storage.code_bits, "BLOCK_ROWS": folded.block_rows, "K_ROWS": k_rows, "K_SCALES": k_scales,
        "V_ROWS": v_rows, "V_SCALES": v_scales,
    }  # fmt: skip


def flats(folded: FoldedRows | None, none: Tensor) -> list[Any]:
    """Return codes, scales and lows of keys, then of values. `none` stands for those that do not exist."""
    if folded is None:
        return [none] * 6
    half = len(folded.flats) // 2
    return [flat for part in (folded.flats[:half], folded.flats[half:]) for flat in (*part, *[none] * (3 - half))]


@triton.jit
def load_folded(
    codes, scales, lows, block, slot, head, inside, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Decode rows of D channels in two parts, (N, D0) and (N, D1) float32. If D1 is 0, both parts are the first one.

    Args:
        block, slot: (N,) the byte address of each row's block, and the index of the row in it.
    """
    x0 = _load_part(codes, scales, lows, block, slot, head, inside, 0, D0, D, BITS, BLOCK_ROWS, SCALE_ROWS, SCALES)
    x1 = x0
    if D1 > 0:
        x1 = _load_part(codes, scales, lows, block, slot, head, inside, D0, D1, D, BITS, BLOCK_ROWS, SCALE_ROWS, SCALES)
    return x0, x1


@triton.jit
def _load_part(
    codes, scales, lows, block, slot, head, inside, START: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Decode channels [START, START + SIZE) of rows: (N, SIZE) float32."""
    d = START + tl.arange(0, SIZE)
    mask = inside[:, None] & (d < D)[None, :]
    row = block + (head * BLOCK_ROWS + slot) * (D if BITS == 0 else D * BITS // 8)
    if BITS == 0:
        x = (
            tl.load(codes + row[:, None] + d[None, :], mask=mask, other=0)
            .to(tl.float8e4nv, bitcast=True)
            .to(tl.float32)
        )
    else:
        # The lowest bits of all bytes hold the first channels, the next bits the following channels.
        N_BYTES: tl.constexpr = D * BITS // 8
        code = tl.load(codes + row[:, None] + (d % N_BYTES)[None, :], mask=mask, other=0).to(tl.int32)
        code = (code >> (d // N_BYTES * BITS)[None, :]) & ((1 << BITS) - 1)
        scale_row = block // 2 + (head * SCALE_ROWS + (slot if SCALE_ROWS > 1 else slot * 0)) * SCALES
        at = scale_row[:, None] + (d // (D // SCALES))[None, :]
        scale, low = tl.load(scales + at, mask=mask, other=0.0), tl.load(lows + at, mask=mask, other=0.0)
        x = code.to(tl.float32) * scale.to(tl.float32) + low.to(tl.float32)
    return x
