"""Stores states in 8 bits per number, with a scale for each row of a head or for each channel: in plain torch.

A row of N numbers takes N + 4 bytes: a code for each number, and a float32 by which all codes are multiplied. Codes are
int8, or float8 e4m3. A row is one of a matrix. Of states (N, E), which have N numbers for each channel, a row is
a channel, since channels differ in size more than the numbers of one do.

Each time that rows fold, a state is rounded again, and a state that decays slowly holds the sum of thousands of such
errors. To the nearest code, errors of one element have the same sign again and again: what a fold adds is lost whenever
it is smaller than half a step. So a number is rounded up as often as its place between two codes says (dithering), and
errors cancel. The chance is no random number: for the first number of a row, it is a hash of the row's index and of the
state's position, and from number to number it grows by the golden section, modulo 1. So the same tokens give the same
bytes again, and errors of neighbours cancel as well.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The dtypes of codes, by the name that `HybridMemory(state_dtype=...)` takes."""

SCALE_BYTES = 4
"""How many bytes follow the codes of a row."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number that a code stands for."""

MIX_ELEMENT, MIX_ROW, MIX_POSITION, MIX_FIRST, MIX_SECOND = 0x9E3779B1, 0xC2B2AE35, 0x85EBCA77, 0x7FEB352D, 0x846CA68B
"""The golden section times 2**32, and the odd factors of the hash: they decide how a number is rounded."""

_32_BITS = 0xFFFFFFFF


def stored_shape(shape: tuple[int, ...], dtype: torch.dtype | None) -> tuple[int, ...]:
    """Return the shape of a state tensor in a block, in elements of its dtype: with 8 bits, rows end with a scale."""
    if dtype not in LARGEST:
        return shape
    rows = shape[::-1] if len(shape) == 2 else shape
    return (*rows[:-1], rows[-1] + SCALE_BYTES)


def read_states(flat: Tensor, offsets_S: Tensor, shape: tuple[int, ...], initial: float) -> Tensor:
    """Read 8-bit states from each byte offset on: (S, *shape) float32. An offset of -1 gives `initial`."""
    stored = stored_shape(shape, flat.dtype)
    at = offsets_S.clamp(min=0)[:, None] + torch.arange(math.prod(stored), device=flat.device)
    rows = flat.view(torch.uint8)[at].view(len(offsets_S), *stored)
    codes, scales = rows.split_with_sizes([stored[-1] - SCALE_BYTES, SCALE_BYTES], -1)
    states = codes.contiguous().view(flat.dtype).float() * scales.contiguous().view(torch.float32)
    states[offsets_S < 0] = initial
    return states.transpose(1, 2).contiguous() if len(shape) == 2 else states


def write_state_(flat: Tensor, offset: Tensor, state: Tensor, position: int) -> None:
    """Write one state in 8 bits, from a byte offset on. `position` is how many tokens it has seen."""
    rows = encode((state.T.contiguous() if state.dim() == 2 else state).float(), flat.dtype, position)
    flat.view(torch.uint8)[offset + torch.arange(rows.numel(), device=flat.device)] = rows.flatten()


def encode(state: Tensor, dtype: torch.dtype, position: int) -> Tensor:
    """Return the bytes (..., N + 4) of a float32 state (..., N). A row with a NaN becomes NaN."""
    scale = state.abs().amax(-1, keepdim=True) / LARGEST[dtype]
    x = (state * torch.where(scale > 0, scale.reciprocal(), 0.0)).nan_to_num(0.0, 0.0, 0.0)
    chance = _chances(state.numel() // state.shape[-1], state.shape[-1], position, state.device).view(state.shape)
    codes = _to_int8(x, chance) if dtype == torch.int8 else _to_float8(x, chance)
    return torch.cat([codes, scale.view(torch.uint8)], -1)


def _to_int8(x: Tensor, chance: Tensor) -> Tensor:
    return (x + (chance >> 8) * 2.0**-24).floor().clamp(-127, 127).to(torch.int8).view(torch.uint8)


def _to_float8(x: Tensor, chance: Tensor) -> Tensor:
    """Round to float8. Below 2**-6 all steps are equal; above, the 20 lowest bits of a float32 are rounded away."""
    size = x.abs()
    large = ((size.view(torch.int32) + (chance >> 12).int()) >> 20) - (120 << 3)
    small = (size * 512 + (chance >> 8) * 2.0**-24).floor().int()
    codes = torch.where(size < 2.0**-6, small, large).clamp(max=126)
    return (codes | (x.view(torch.int32) >> 24) & 0x80).to(torch.uint8)


def _chances(n_rows: int, n_columns: int, position: int, device: torch.device) -> Tensor:
    """Return 32 random bits, by which each number of a state is rounded at this position: (rows, N) int64."""
    x = (torch.arange(n_rows, device=device) * MIX_ROW + position * MIX_POSITION) & _32_BITS
    for shift, factor in ((16, MIX_FIRST), (15, MIX_SECOND)):
        x = ((x ^ (x >> shift)) * factor) & _32_BITS
    x = x ^ (x >> 16)
    return (x[:, None] + torch.arange(n_columns, device=device) * MIX_ELEMENT) & _32_BITS
