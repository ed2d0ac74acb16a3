"""Reads and writes states of 8 bits in Triton; `memory.kernels.eight_bits` says how a row is stored and rounded.

Recurrences compute with float32. So a call has float32 copies of its states: bodies are decoded into them before, and
new bodies are encoded after. Tokens behind a tail read most bodies without a new one, so `matrix_tails` reads codes as
they are, and needs copies of new bodies alone.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.kernels import eight_bits
from hybridmem.memory.kernels.cuda.launch import launch, next_power_of_2
from hybridmem.memory.kernels.cuda.math import bound
from hybridmem.memory.kernels.signature import StateSlots

NO_CODES, INT8, FLOAT8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What a state consists of: floats, or codes of 8 bits."""

SCALE_BYTES = tl.constexpr(eight_bits.SCALE_BYTES)
_ELEMENT, _ROW, _POSITION = (
    tl.constexpr(x) for x in (eight_bits.MIX_ELEMENT, eight_bits.MIX_ROW, eight_bits.MIX_POSITION)
)
_FIRST, _SECOND = tl.constexpr(eight_bits.MIX_FIRST), tl.constexpr(eight_bits.MIX_SECOND)
_32_BITS = tl.constexpr(0xFFFFFFFF)

_NUMBERS_AT_ONCE = 2048
"""How many numbers of a state a program has: 16 for each thread of four warps."""


def codes_of(state: StateSlots) -> int:
    """Return which codes a state consists of."""
    codes = {torch.int8: INT8, torch.float8_e4m3fn: FLOAT8}.get(state.flat.dtype, NO_CODES)
    return int(codes.value)


def room_for_copies(state: StateSlots) -> StateSlots:
    """Return slots for float32 copies of these states, and of their new bodies. The copies are not written yet."""
    n_runs, size = len(state.cu_rows.host) - 1, math.prod(state.shape)
    places = torch.arange(2 * n_runs, device=state.flat.device) * size
    return state._replace(
        flat=torch.empty(2 * n_runs * size, dtype=torch.float32, device=state.flat.device),
        sources=torch.where(state.sources < 0, -1, places[:n_runs]),
        targets=torch.where(state.targets < 0, -1, places[n_runs:]),
    )


def decode(state: StateSlots, copies: StateSlots) -> None:
    """Write float32 copies of the bodies that there are."""
    grid, sizes = _layout(state)
    launch(_decode, grid, state.flat.view(torch.uint8), state.sources, copies.flat, copies.sources, **sizes)


def encode(copies: StateSlots, state: StateSlots) -> None:
    """Write in 8 bits the new bodies that a recurrence has left in the copies."""
    assert state.tail is not None, "states of 8 bits come before tails"
    grid, sizes = _layout(state)
    launch(
        _encode, grid, copies.flat, copies.targets, state.flat.view(torch.uint8), state.targets, state.tail.firsts,
        state.tail.folds, eight_bits.LARGEST[state.flat.dtype], **sizes,
    )  # fmt: skip


def _layout(state: StateSlots) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the launch grid, and the sizes of rows. Of states (N, E) a row is a channel, whose copy is a column."""
    is_channel, n_numbers = len(state.shape) == 2, state.shape[-1]
    if is_channel:
        n_numbers, n_rows = state.shape
    else:
        n_rows = math.prod(state.shape[:-1])
    numbers = next_power_of_2(n_numbers)
    rows = min(next_power_of_2(n_rows), max(1, _NUMBERS_AT_ONCE // numbers))
    sizes = {
        "N_ROWS": n_rows, "N_NUMBERS": n_numbers, "ROW_STRIDE": 1 if is_channel else n_numbers,
        "STRIDE": n_rows if is_channel else 1, "CODES": codes_of(state), "ROWS": rows, "NUMBERS": numbers,
    }  # fmt: skip
    return (len(state.cu_rows.host) - 1, ceil_div(n_rows, rows)), sizes


@triton.jit
def load_state(body, r, limit, n, n_columns, initial, CODES: tl.constexpr):
    """Load rows r and columns n of a head's state, which begins at `body`: (rows, columns) float32.

    Rows from `limit` on are `initial`, and columns from `n_columns` on are `initial` or 0.
    """
    is_row, is_column = r < limit, (n < n_columns)[None, :]
    if CODES == NO_CODES:
        at = body + r[:, None] * n_columns + n[None, :]
        s = tl.load(at, mask=is_row[:, None] & is_column, other=initial).to(tl.float32)
    else:
        rows = body + r * (n_columns + SCALE_BYTES)
        codes = tl.load(rows[:, None] + n[None, :], mask=is_row[:, None] & is_column, other=0)
        if CODES == INT8:
            numbers = codes.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        s = tl.where(is_row[:, None], numbers * _scale(rows + n_columns, is_row)[:, None], initial)
    return s


@triton.jit
def _scale(at, is_row):
    """Load a float32 byte by byte, because rows need not begin at multiples of four bytes."""
    bits = tl.load(at, mask=is_row, other=0).to(tl.uint32)
    for i in tl.static_range(1, 4):
        bits |= tl.load(at + i, mask=is_row, other=0).to(tl.uint32) << (8 * i)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _decode(
    flat, sources, copies, places, N_ROWS: tl.constexpr, N_NUMBERS: tl.constexpr, ROW_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    run, r, n = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, NUMBERS)
    source = tl.load(sources + run)
    limit = bound(source, N_ROWS)
    s = load_state(flat + source, r, limit, n, N_NUMBERS, 0.0, CODES)
    at = copies + tl.load(places + run) + r[:, None] * ROW_STRIDE + n[None, :] * STRIDE
    tl.store(at, s, mask=(r < limit)[:, None] & (n < N_NUMBERS)[None, :])


@triton.jit
def _encode(
    copies, places, flat, targets, firsts, folds, largest, N_ROWS: tl.constexpr, N_NUMBERS: tl.constexpr,
    ROW_STRIDE: tl.constexpr, STRIDE: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    run, r, n = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, NUMBERS)
    target = tl.load(targets + run)
    is_row = r < bound(target, N_ROWS)
    mask = is_row[:, None] & (n < N_NUMBERS)[None, :]
    at = copies + tl.load(places + run) + r[:, None] * ROW_STRIDE + n[None, :] * STRIDE
    s = tl.load(at, mask=mask, other=0.0)
    # A row with a NaN gets a scale of NaN, and one with an infinite number an infinite scale. Both become NaN.
    is_nan = tl.max((s != s).to(tl.int32), axis=1) > 0
    one = tl.full((ROWS,), 1.0, tl.float32)
    scale = tl.where(is_nan, float("nan"), tl.div_rn(tl.max(tl.abs(s), axis=1), one * largest))
    factor = tl.where(scale > 0, tl.div_rn(one, tl.where(scale > 0, scale, 1.0)), 0.0)
    x = s * factor[:, None]
    x = tl.where(tl.abs(x) <= 2 * largest, x, 0.0)
    chance = _chances(r, n, tl.load(firsts + run) + tl.load(folds + run))
    codes = _to_int8(x, chance) if CODES == INT8 else _to_float8(x, chance)
    rows = flat + target + r * (N_NUMBERS + SCALE_BYTES)
    tl.store(rows[:, None] + n[None, :], codes, mask=mask)
    bits = scale.to(tl.uint32, bitcast=True)
    for i in tl.static_range(4):
        tl.store(rows + N_NUMBERS + i, ((bits >> (8 * i)) & 0xFF).to(tl.uint8), mask=is_row)


@triton.jit
def _chances(r, n, position):
    """Return 32 random bits for each number of rows r: (rows, numbers) int64."""
    x = (r.to(tl.int64) * _ROW + position * _POSITION) & _32_BITS
    x = ((x ^ (x >> 16)) * _FIRST) & _32_BITS
    x = ((x ^ (x >> 15)) * _SECOND) & _32_BITS
    x = x ^ (x >> 16)
    return (x[:, None] + n.to(tl.int64)[None, :] * _ELEMENT) & _32_BITS


@triton.jit
def _to_int8(x, chance):
    rounded = tl.floor(x + (chance >> 8).to(tl.float32) * 2.0**-24)
    return tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8).to(tl.uint8, bitcast=True)


@triton.jit
def _to_float8(x, chance):
    size = tl.abs(x)
    large = ((size.to(tl.int32, bitcast=True) + (chance >> 12).to(tl.int32)) >> 20) - (120 << 3)
    small = tl.floor(size * 512 + (chance >> 8).to(tl.float32) * 2.0**-24).to(tl.int32)
    codes = tl.minimum(tl.where(size < 2.0**-6, small, large), 126)
    return (codes | (x.to(tl.int32, bitcast=True) >> 24) & 0x80).to(tl.uint8)
