"""Computes the causal convolution on the GPU.
A program computes a tile of one segment's rows, over some of the channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cuda.choices import powers_of_2, tunable
from hybridmem.memory.kernels.cuda.launch import absent, launch, next_power_of_2, with_contiguous_rows
from hybridmem.memory.kernels.cuda.math import bound, count_pieces, first_piece, run_of, silu
from hybridmem.memory.kernels.cuda.prompts import conv_by_library
from hybridmem.memory.kernels.signature import Prepared, StateSlots


class Convolve(NamedTuple):
    """Holds a choice for the convolution: the most rows and elements of a tile, and the number of warps."""

    rows: int
    elements: int
    num_warps: int


@tunable(
    "causal_conv", Convolve, rows=powers_of_2(1, 128), elements=powers_of_2(128, 8192), num_warps=powers_of_2(1, 16)
)
def _choose(n_taps: int, itemsize: int) -> Convolve:
    return Convolve(16, 1024, 4)


def causal_conv(
    rows_TR: Tensor, weight_WE: Prepared, bias_E: Prepared | None, window: StateSlots, *, activation: bool = True
) -> Tensor:
    checks.causal_conv(rows_TR, weight_WE, bias_E, window, checks.FLOATS)
    n_taps, n_channels = weight_WE.shape
    rows_TR = with_contiguous_rows(rows_TR)
    if (out := conv_by_library(rows_TR, weight_WE, bias_E, window, activation=activation)) is not None:
        return out
    out_TE = torch.empty(rows_TR.shape[0], n_channels, dtype=rows_TR.dtype, device=rows_TR.device)
    most_rows, n_elements, num_warps = _choose(rows_TR.device, n_taps, rows_TR.element_size())
    n_rows = min(most_rows, next_power_of_2(int(np.diff(window.cu_rows.host).max(initial=1))))
    n_columns = min(next_power_of_2(n_channels), n_elements // n_rows)
    is_short, tail = (
        bool(np.diff(window.cu_rows.host).max(initial=1) <= n_rows),
        window.tail,
    )  # The first dimension has a tile for each run.
    cu_rows, n_runs = window.cu_rows.device, len(window.cu_rows.host) - 1
    n_tiles = n_runs if is_short else count_pieces(window.cu_rows.host, n_rows, 1)
    ring = (rows_TR, cu_rows, 1, 0, cu_rows, cu_rows, cu_rows)
    if tail is not None:
        ring = (tail.flats[0], tail.sources[0], tail.ring_rows, rows_TR.shape[1], tail.firsts, tail.counts, tail.folds)
    arguments = (
        rows_TR, rows_TR.stride(0), weight_WE, absent(bias_E, rows_TR), out_TE, cu_rows, n_runs, n_channels,
        window.flat, window.sources, window.targets, float(window.initial), *ring,
    )  # fmt: skip
    options: dict[str, Any] = {
        "HAS_BIAS": bias_E is not None, "HAS_TAIL": tail is not None, "ACTIVATION": activation, "TAPS": n_taps,
        "WINDOW": next_power_of_2(n_taps - 1), "ROWS": n_rows, "CHANNELS": n_columns, "IS_SHORT": is_short,
        "num_warps": num_warps,
    }  # fmt: skip
    # Windows are written after all tiles, because a segment of several tiles may write its window where it reads one.
    n_blocks = ceil_div(n_channels, n_columns)
    launch(_causal_conv, (n_tiles, n_blocks), *arguments, **options, WRITES_ROWS=True, WRITES_WINDOW=is_short)
    if not is_short:
        launch(_causal_conv, (n_tiles, n_blocks), *arguments, **options, WRITES_ROWS=False, WRITES_WINDOW=True)
    return out_TE


@triton.jit
def _causal_conv(
    rows, row_stride, weight, bias, out, cu_rows, n_runs, n_channels, flat, sources, targets, initial, ring,
    ring_blocks, ring_rows, ring_stride, firsts, counts, folds, HAS_BIAS: tl.constexpr, HAS_TAIL: tl.constexpr,
    ACTIVATION: tl.constexpr, TAPS: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    IS_SHORT: tl.constexpr, WRITES_ROWS: tl.constexpr, WRITES_WINDOW: tl.constexpr,
):  # fmt: skip
    run, first = tl.program_id(0).to(tl.int64), tl.zeros((), tl.int64)
    if not IS_SHORT:
        run = run_of(tl.program_id(0), cu_rows, n_runs, ROWS, 1).to(tl.int64)
        first = (tl.program_id(0) - first_piece(run, cu_rows, ROWS, 1)).to(tl.int64) * ROWS
    start, n_rows = tl.load(cu_rows + run), tl.load(cu_rows + run + 1) - tl.load(cu_rows + run)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < n_channels
    source, target = tl.load(sources + run), tl.load(targets + run)
    count, fold, block, slot = tl.zeros((), tl.int64), n_rows, tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    if HAS_TAIL:
        count, fold, slot = tl.load(counts + run), tl.load(folds + run), tl.load(firsts + run)
        block = tl.load(ring_blocks + run)
    if WRITES_ROWS:
        row = first + tl.arange(0, ROWS)
        y = tl.zeros((ROWS, CHANNELS), tl.float32)
        if HAS_BIAS:
            y += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        for w in tl.static_range(TAPS):
            tap = tl.load(weight + w * n_channels + channels, mask=is_channel, other=0.0).to(tl.float32)
            y += tap[None, :] * _before(
                count + row - (TAPS - 1) + w, channels, (row < n_rows)[:, None] & is_channel[None, :], rows, row_stride,
                start, count, flat, source, initial, ring, block, slot, ring_rows, ring_stride, n_channels, HAS_TAIL,
                TAPS,
            )  # fmt: skip
        if ACTIVATION:
            y = silu(y)
        at = out + (start + row)[:, None] * n_channels + channels[None, :]
        tl.store(at, y.to(out.dtype.element_ty), mask=(row < n_rows)[:, None] & is_channel[None, :])
    if WRITES_WINDOW and (first + ROWS >= n_rows) & ((first < n_rows) | IS_SHORT):
        kept = tl.arange(0, WINDOW)
        mask = (kept < bound(target, TAPS - 1))[:, None] & is_channel[None, :]
        x = _before(
            fold - (TAPS - 1) + kept, channels, mask, rows, row_stride, start, count,
            flat, source, initial, ring, block, slot, ring_rows, ring_stride, n_channels, HAS_TAIL, TAPS,
        )  # fmt: skip
        tl.debug_barrier()  # All threads have read the window, so it can be written in place.
        tl.store(flat + target + kept[:, None] * n_channels + channels[None, :], x.to(flat.dtype.element_ty), mask=mask)


@triton.jit
def _before(
    p, channels, mask, rows, row_stride, start, count, flat, source, initial, ring, block, slot, ring_rows, ring_stride,
    n_channels, HAS_TAIL: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Load inputs at positions p, counted from the state in `source`: from its window, the ring or the new rows."""
    is_new = (p >= count)[:, None]
    x = tl.load(rows + (start + p - count)[:, None] * row_stride + channels[None, :], mask=mask & is_new, other=0.0).to(
        tl.float32
    )
    in_window = mask & (p < 0)[:, None]
    at = flat + source + (p + TAPS - 1)[:, None] * n_channels + channels[None, :]
    is_kept = mask & (p < tl.where(source < 0, -TAPS, 0))[:, None]
    x = tl.where(in_window, tl.load(at, mask=is_kept, other=initial).to(tl.float32), x)
    if HAS_TAIL:
        in_ring = mask & ((p >= 0) & (p < count))[:, None]
        at = ring + block + ((slot + p) % ring_rows)[:, None] * ring_stride + channels[None, :]
        x = tl.where(in_ring, tl.load(at, mask=in_ring, other=0.0).to(tl.float32), x)
    return x
