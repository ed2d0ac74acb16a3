"""Computes recurrences with a few numbers per channel as state (RG-LRU, RWKV-4), and softplus for gates, on the GPU.
A program computes one segment, over some of the channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cuda.choices import powers_of_2, tunable
from hybridmem.memory.kernels.cuda.launch import launch, next_power_of_2, with_contiguous_rows
from hybridmem.memory.kernels.cuda.math import bound
from hybridmem.memory.kernels.cuda.math import softplus as softplus_of
from hybridmem.memory.kernels.cuda.rings import keep_row, no_rings, rings_of
from hybridmem.memory.kernels.signature import Prepared, StateSlots


class Vectors(NamedTuple):
    """Holds a choice: how many channels a program has, and how many warps."""

    channels: int
    num_warps: int


@tunable("vectors", Vectors, channels=powers_of_2(16, 4096), num_warps=powers_of_2(1, 16))
def _choose(itemsize: int) -> Vectors:
    """Choose for `linear_scan`, `wkv4` and `stabilise`.
    With more channels, some of a device's processors would have no work.
    """
    return Vectors(128, 4)


def softplus(x_TH: Tensor, bias_H: Prepared) -> Tensor:
    checks.softplus(x_TH, bias_H, checks.FLOATS)
    n_rows, n_columns = x_TH.shape
    out_TH = torch.empty(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    x_TH = with_contiguous_rows(x_TH)
    columns = min(1024, next_power_of_2(n_columns))
    rows = max(1, 1024 // columns)
    grid = (ceil_div(n_rows, rows), ceil_div(n_columns, columns))
    launch(_softplus, grid, x_TH, x_TH.stride(0), bias_H, out_TH, n_rows, n_columns, ROWS=rows, COLUMNS=columns)
    return out_TH


@triton.jit
def _softplus(x, x_stride, bias, out, n_rows, n_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < n_rows) & (columns < n_columns)[None, :]
    z = tl.load(x + rows * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    z += tl.load(bias + columns, mask=columns < n_columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out + rows * n_columns + columns, softplus_of(z), mask=mask)


def linear_scan(x_TE: Tensor, decay_TE: Tensor, state: StateSlots) -> Tensor:
    checks.linear_scan(x_TE, decay_TE, state, checks.FLOATS)
    n_channels = x_TE.shape[1]
    y_TE = torch.empty(x_TE.shape, dtype=torch.float32, device=x_TE.device)
    x_TE, decay_TE = with_contiguous_rows(x_TE), with_contiguous_rows(decay_TE)
    cu_rows = state.cu_rows.device
    channels, num_warps = _choose(x_TE.device, x_TE.element_size())
    grid = (len(state.cu_rows.host) - 1, ceil_div(n_channels, channels))
    launch(
        _linear_scan, grid, x_TE, x_TE.stride(0), decay_TE, decay_TE.stride(0), y_TE, cu_rows, state.flat,
        state.sources, state.targets, float(state.initial), n_channels, CHANNELS=channels, num_warps=num_warps,
    )  # fmt: skip
    return y_TE


@triton.jit
def _linear_scan(
    x, x_stride, decay, decay_stride, y, cu_rows, flat, sources, targets, initial, n_channels, CHANNELS: tl.constexpr
):
    run = tl.program_id(0)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channels < n_channels
    source, target = tl.load(sources + run), tl.load(targets + run)
    h = tl.load(flat + source + channels, mask=channels < bound(source, n_channels), other=initial).to(tl.float32)
    for t in range(tl.load(cu_rows + run), tl.load(cu_rows + run + 1)):
        w = tl.load(decay + t * decay_stride + channels, mask=mask, other=0.0).to(tl.float32)
        h = w * h + tl.load(x + t * x_stride + channels, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + t * n_channels + channels, h, mask=mask)
    tl.debug_barrier()  # All threads have read the state, so it can be written in place.
    tl.store(flat + target + channels, h.to(flat.dtype.element_ty), mask=channels < bound(target, n_channels))


def wkv4(k_TE: Tensor, v_TE: Tensor, decay_E: Prepared, first_E: Prepared, states: tuple[StateSlots, ...]) -> Tensor:
    checks.wkv4(k_TE, v_TE, decay_E, first_E, states, checks.FLOATS)
    n_channels = v_TE.shape[1]
    y_TE = torch.empty(v_TE.shape, dtype=torch.float32, device=v_TE.device)
    k_TE, v_TE = with_contiguous_rows(k_TE), with_contiguous_rows(v_TE)
    top, below, exponent = states
    channels, num_warps = _choose(v_TE.device, v_TE.element_size())
    grid = (len(top.cu_rows.host) - 1, ceil_div(n_channels, channels))
    launch(
        _wkv4, grid, k_TE, k_TE.stride(0), v_TE, v_TE.stride(0), decay_E, first_E, y_TE,
        top.cu_rows.device, top.flat, top.sources, top.targets, float(top.initial), below.flat,
        below.sources, below.targets, float(below.initial), exponent.flat, exponent.sources, exponent.targets,
        float(exponent.initial), n_channels, CHANNELS=channels, num_warps=num_warps,
    )  # fmt: skip
    return y_TE


@triton.jit
def _wkv4(
    k, k_stride, v, v_stride, decay, first, y, cu_rows, top_flat, top_sources, top_targets, top_initial, below_flat,
    below_sources, below_targets, below_initial, exponent_flat, exponent_sources, exponent_targets, exponent_initial,
    n_channels, CHANNELS: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channels < n_channels
    fade = tl.load(decay + channels, mask=mask, other=0.0).to(tl.float32)
    bonus = tl.load(first + channels, mask=mask, other=0.0).to(tl.float32)
    top = _load(top_flat, top_sources + run, channels, n_channels, top_initial)
    below = _load(below_flat, below_sources + run, channels, n_channels, below_initial)
    exponent = _load(exponent_flat, exponent_sources + run, channels, n_channels, exponent_initial)
    for t in range(tl.load(cu_rows + run), tl.load(cu_rows + run + 1)):
        key = tl.load(k + t * k_stride + channels, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(v + t * v_stride + channels, mask=mask, other=0.0).to(tl.float32)
        highest = tl.maximum(exponent, key + bonus)
        old, new = tl.exp(exponent - highest), tl.exp(key + bonus - highest)
        tl.store(y + t * n_channels + channels, (old * top + new * value) / (old * below + new), mask=mask)
        highest = tl.maximum(exponent + fade, key)
        old, new = tl.exp(exponent + fade - highest), tl.exp(key - highest)
        top = old * top + new * value
        below = old * below + new
        exponent = highest
    tl.debug_barrier()
    _store(top_flat, top_targets + run, channels, n_channels, top)
    _store(below_flat, below_targets + run, channels, n_channels, below)
    _store(exponent_flat, exponent_targets + run, channels, n_channels, exponent)


def stabilise(gate_TH: Tensor, log_decay_TH: Tensor, state: StateSlots) -> Tensor:
    checks.stabilise(gate_TH, log_decay_TH, state, checks.FLOATS)
    n_rows, n_heads = gate_TH.shape
    out_3TH = torch.empty(3, n_rows, n_heads, dtype=torch.float32, device=gate_TH.device)
    gate_TH, log_decay_TH = with_contiguous_rows(gate_TH), with_contiguous_rows(log_decay_TH)
    most, num_warps = _choose(gate_TH.device, gate_TH.element_size())
    heads, cu_rows = min(most, next_power_of_2(n_heads)), state.cu_rows.device
    rings = no_rings(cu_rows, 1) if state.tail is None else rings_of(state.tail)
    launch(
        _stabilise, (len(state.cu_rows.host) - 1, ceil_div(n_heads, heads)), gate_TH, gate_TH.stride(0), log_decay_TH,
        log_decay_TH.stride(0), out_3TH, cu_rows, state.flat, state.sources, state.targets, float(state.initial),
        *rings, n_rows * n_heads, n_heads, HAS_TAIL=state.tail is not None, CHANNELS=heads, num_warps=num_warps,
    )  # fmt: skip
    return out_3TH


@triton.jit
def _stabilise(
    gate, gate_stride, log_decay, decay_stride, out, cu_rows, flat, sources, targets, initial, ring, ring_sources,
    ring_targets, ring_rows, firsts, counts, folds, part, n_heads, HAS_TAIL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    heads = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = heads < n_heads
    start, end, target = tl.load(cu_rows + run), tl.load(cu_rows + run + 1), tl.load(targets + run)
    m = _load(flat, sources + run, heads, n_heads, initial)
    if HAS_TAIL:
        first, count = tl.load(firsts + run).to(tl.int32), tl.load(counts + run).to(tl.int32)
        fold = tl.where(target < 0, -1, tl.load(folds + run).to(tl.int32))
        # The ring holds m after each token. Read it after the tail's last token, and after the last one that folds.
        old = ring + tl.load(ring_sources + run) + heads
        at_fold = tl.load(old + (first + fold - 1) % ring_rows * n_heads, mask=heads < tl.where(fold > 0, n_heads, 0))
        body = tl.where(fold > 0, at_fold.to(tl.float32), m)
        last = tl.load(old + (first + count - 1) % ring_rows * n_heads, mask=heads < tl.where(count > 0, n_heads, 0))
        m = tl.where(count > 0, last.to(tl.float32), m)
        body = tl.where(fold < count, body, m)
    for t in range(start, end):
        exponent = tl.load(gate + t * gate_stride + heads, mask=mask, other=0.0).to(tl.float32)
        faded = m + tl.load(log_decay + t * decay_stride + heads, mask=mask, other=0.0).to(tl.float32)
        m = tl.maximum(faded, exponent)
        at = out + t * n_heads + heads
        tl.store(at, faded - m, mask=mask)
        tl.store(at + part, tl.exp(exponent - m), mask=mask)
        tl.store(at + 2 * part, tl.exp(-m), mask=mask)
        if HAS_TAIL:
            p = (t - start).to(tl.int32) + count
            m = keep_row(ring, ring_targets, run, (first + p) % ring_rows, m, heads, n_heads, p >= fold)
            body = tl.where(p + 1 == fold, m, body)
    tl.debug_barrier()  # All threads have read the state, so it can be written in place.
    if HAS_TAIL:
        m = body
    _store(flat, targets + run, heads, n_heads, m)


@triton.jit
def _load(flat, at, channels, n_channels, initial):
    source = tl.load(at)
    return tl.load(flat + source + channels, mask=channels < bound(source, n_channels), other=initial).to(tl.float32)


@triton.jit
def _store(flat, at, channels, n_channels, x):
    target = tl.load(at)
    tl.store(flat + target + channels, x.to(flat.dtype.element_ty), mask=channels < bound(target, n_channels))
