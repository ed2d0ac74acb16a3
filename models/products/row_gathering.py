"""Reads single rows of weights that are laid out for products. So an embedding that is also the head is held once."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hybridmem.memory.blocks import ceil_div
from hybridmem.memory.kernels.cpu.parts import as_array, compiled, get, subroutine, use_threads
from hybridmem.models.weights.layouts import BLOCK, GROUP, PAIRS, Layout, spare_bits, whole_pairs

PASSES_ADDRESSES = True
"""Declares that arrays and addresses taken from tensors here go only to kernels (`memory.kernels.cpu.recording`)."""

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_SCALE_TYPES = {"bfloat16": np.uint16, "float16": np.int16, "float32": np.float32}


@cache
def _places(n_bits: int) -> np.ndarray:
    """Return, for each pair and each bit of its code, 16 times its word plus its place in it.

    For 8 bits, return none.
    """
    if n_bits == 8:
        return np.empty((0, 0), np.int64)
    found = np.zeros((PAIRS, n_bits), np.int64)
    for pair in range(PAIRS):
        per_word = 16 // n_bits
        for i in range(n_bits):
            if pair < whole_pairs(n_bits):
                found[pair, i] = 16 * (pair // per_word) + pair % per_word * n_bits + i
            else:
                word, bit = spare_bits(n_bits, pair)[i]
                found[pair, i] = 16 * word + bit
    return found


@cache
def _numbers(layout: Layout) -> np.ndarray:
    """Return the integers for which codes stand, if they are few."""
    if layout.float8 is not None:
        every = torch.arange(256, dtype=torch.uint8).view(getattr(torch, layout.float8)).float()
        return np.asarray(every)
    if layout.n_bits == 8:
        return np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
    own = layout.table or [code - layout.zero for code in range(1 << layout.n_bits)]
    return np.array(own, np.float32)


_MINIMA = {None: 0, "float": 1, "factor": 2, "zero": 3}


@cache
def _sizes(layout: Layout, n_in: int) -> np.ndarray:
    """Return the sizes that kernels read, always in the same array, so that a recorded step finds the array again."""
    return np.array([
        layout.n_bits, ceil_div(n_in, GROUP), layout.unit_inputs or n_in, layout.group or n_in, layout.n_units(n_in),
        layout.unit_shorts, layout.n_floats, layout.n_factors, int(layout.has_factors), _MINIMA[layout.minimum],
    ])  # fmt: skip


def gather(layout: Layout, codes: Tensor, scales: Tensor, n_out: int, n_in: int, indices: Tensor) -> Tensor:
    """Return the rows (T, n_in) float32 of a weight that have the indices (T,)."""
    rows = torch.empty(len(indices), n_in)
    _gather(
        as_array(codes), as_array(scales).view(_SCALE_TYPES[layout.scale]), as_array(scales).view(np.int8),
        as_array(indices), n_out, _sizes(layout, n_in), _places(layout.n_bits), _numbers(layout),
        use_threads(rows.numel() * 4), as_array(rows),
    )  # fmt: skip
    return rows


@compiled(parallel=True)
def _gather(codes, floats, factors, indices, n_out, sizes, places, numbers, n_parts, out):
    n = len(indices)
    for t in range(n):
        if indices[t] < 0 or indices[t] >= n_out:
            raise IndexError("there is no such row of the weight")
    for part in prange(n_parts):
        for t in range(part * n // n_parts, (part + 1) * n // n_parts):
            _gather_row(codes, floats, factors, indices[t], sizes, places, numbers, out[t])


@subroutine()
def _gather_row(codes, floats, factors, index, sizes, places, numbers, out):
    n_bits, n_groups, unit, group, n_units, unit_shorts = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
    n_floats, n_factors, has_factors, minimum = sizes[6], sizes[7], sizes[8], sizes[9]
    per_float = 1 if floats.itemsize == 2 else 2
    block, lane = index // BLOCK, index % BLOCK
    group_bytes = n_bits * GROUP * BLOCK // 8
    for start in range(0, len(out), group):
        own, of_unit = (block * n_units + start // unit) * unit_shorts, start % unit // group
        scale, least, zero = get(floats, own // per_float + lane), _ZERO, _ZERO
        at = 2 * (own + n_floats * per_float * BLOCK) + of_unit * n_factors * BLOCK + lane
        if minimum == 1:
            least = get(floats, own // per_float + BLOCK + lane)
        elif minimum == 2:
            least = -get(floats, own // per_float + BLOCK + lane) * np.float32(factors[at + has_factors * BLOCK])
        elif minimum == 3:
            zero = np.float32(factors[at + has_factors * BLOCK])
        if has_factors:
            scale *= np.float32(factors[at])
        for e in range(start, min(start + group, len(out))):
            first, pair, side = (block * n_groups + e // GROUP) * group_bytes, e % GROUP // 2, e % 2
            code = np.int64(0)
            if n_bits == 8:
                code = np.int64(codes[first + 2 * BLOCK * pair + 2 * lane + side])
            else:
                for i in range(n_bits):
                    place = places[pair, i]
                    byte = codes[first + 4 * BLOCK * (place // 16) + 4 * lane + 2 * side + place % 16 // 8]
                    code |= (np.int64(byte) >> place % 8 & 1) << i
            out[e] = (numbers[code] - zero) * scale + least
