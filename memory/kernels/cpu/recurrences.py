"""Computes the causal convolution and Mamba-1's selective scan, on the CPU.
A task is one segment, over some of the channels.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.eight_bit_channels import decoded_channels, encode_channels
from hybridmem.memory.kernels.cpu.eight_bit_rows import has_8_bits
from hybridmem.memory.kernels.cpu.numbers import array_at, get
from hybridmem.memory.kernels.cpu.rows import LIKE, as_array, close, copy_, fill_, opened
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, subroutine
from hybridmem.memory.kernels.cpu.tail_states import arrays_of, convolve, places_of, scan_channels
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.cpu.vector_math import LOG2_E, exp2_f32, exp_f32, softplus_f32
from hybridmem.memory.kernels.signature import Prepared, StateSlots

_LONG_RUN = 128
"""Channels of a task in long segments: 128 x 16 states (8 KiB) stay in the first-level cache between rows."""

_ONE, _FLOATS = np.float32(1.0), LIKE[torch.float32]


def channels_at_once(cu_rows: Int64s, n_rows: int, n_channels: int, n_threads: int) -> int:
    """Return how many channels a task has.

    In short segments each state is read only once. So a task takes as many channels as leave two tasks for each thread.
    """
    n_runs = len(cu_rows) - 1
    if n_rows >= 4 * n_runs:
        return _LONG_RUN
    n_chunks = -(-2 * n_threads // n_runs)
    return -(-n_channels // (64 * n_chunks)) * 64


@cache
def _no_bias(n_channels: int, dtype: np.dtype) -> np.ndarray:
    """Return zeros, always in the same array, because a step is recorded only if its calls take the same arrays."""
    return np.zeros(n_channels, dtype)


def causal_conv(
    rows_TR: Tensor, weight_WE: Prepared, bias_E: Prepared | None, window: StateSlots, *, activation: bool = True
) -> Tensor:
    checks.causal_conv(rows_TR, weight_WE, bias_E, window, checks.FLOATS_UP_TO_32_BITS)
    n_taps, n_channels = weight_WE.shape
    out_TE = rows_TR.new_empty(rows_TR.shape[0], n_channels)
    weight = as_array(weight_WE)
    bias = _no_bias(n_channels, weight.dtype) if bias_E is None else as_array(bias_E)
    n_threads = use_threads(2 * out_TE.numel() * n_taps)
    if window.tail is not None:
        ring, blocks, _, spans = arrays_of(window.tail)
        convolve(
            as_array(rows_TR.contiguous()), weight, bias, *places_of(window), ring[0], blocks[0],
            window.tail.ring_rows, *spans, as_array(out_TE), activation,
        )  # fmt: skip
        return out_TE
    at_once = channels_at_once(window.cu_rows.host, out_TE.shape[0], n_channels, n_threads)
    rows = rows_TR.contiguous()
    convolve_at(
        rows.data_ptr(), *rows.shape, LIKE[rows.dtype], weight, bias, window.cu_rows.host, as_array(window.flat),
        as_array(window.sources), as_array(window.targets), np.float32(window.initial), out_TE.data_ptr(), at_once,
        activation,
    )  # fmt: skip
    return out_TE


@compiled(ELEMENTWISE, parallel=True)
def convolve_rows(rows_TR, weight_WE, bias_E, cu_rows, flat, sources, targets, initial, out_TE, at_once, activation):
    n_taps, n_channels = weight_WE.shape
    n_chunks = -(-n_channels // at_once)
    for task in prange((len(cu_rows) - 1) * n_chunks):
        i, first = task // n_chunks, (task % n_chunks) * at_once
        last = min(first + at_once, n_channels)
        start, end = cu_rows[i], cu_rows[i + 1]
        source, target, width = sources[i] + first, targets[i] + first, last - first
        if source < first:  # The segment has no rows before it.
            source = target
            for w in range(n_taps - 1):
                fill_(flat[target + w * n_channels : target + w * n_channels + width], initial)
        out = np.empty(width, np.float32)
        for t in range(start, end):
            copy_(out, bias_E[first:last])
            for w in range(n_taps):
                r = t - (n_taps - 1 - w)
                if r >= start:
                    _add_product_(out, weight_WE[w, first:last], rows_TR[r, first:last])
                else:
                    before = source + (r - start + n_taps - 1) * n_channels
                    _add_product_(out, weight_WE[w, first:last], flat[before : before + width])
            if activation:
                _silu_(out)
            copy_(out_TE[t, first:last], out)
        # The oldest row comes first: if source and target are the same, a row must be read before it is overwritten.
        for w in range(n_taps - 1):
            r = end - (n_taps - 1 - w)
            after = flat[target + w * n_channels : target + w * n_channels + width]
            if r >= start:
                copy_(after, rows_TR[r, first:last])
            else:
                before = source + (r - start + n_taps - 1) * n_channels
                copy_(after, flat[before : before + width])


@compiled()
def convolve_at(
    rows_at, n_rows, row_width, like, weight_WE, bias_E, cu_rows, flat, sources, targets, initial, out_at, at_once,
    activation,
):  # fmt: skip
    rows_TR = array_at(rows_at, n_rows * row_width, like).reshape((n_rows, row_width))
    out_TE = array_at(out_at, n_rows * weight_WE.shape[1], like).reshape((n_rows, weight_WE.shape[1]))
    convolve_rows(rows_TR, weight_WE, bias_E, cu_rows, flat, sources, targets, initial, out_TE, at_once, activation)


@subroutine(ELEMENTWISE)
def _add_product_(out, a, b):
    for e in range(len(out)):
        out[e] += get(a, e) * get(b, e)


@subroutine(ELEMENTWISE)
def _silu_(x):
    for e in range(len(x)):
        x[e] = x[e] / (_ONE + exp_f32(-x[e]))


def selective_scan(
    x_TE: Tensor,
    dt_TE: Tensor,
    dt_bias_E: Prepared,
    b_TN: Tensor,
    c_TN: Tensor,
    a_NE: Prepared,
    d_E: Prepared,
    state: StateSlots,
) -> Tensor:
    y_TE = torch.empty(x_TE.shape)
    checks.selective_scan(x_TE, dt_TE, dt_bias_E, b_TN, c_TN, a_NE, d_E, state, checks.FLOATS_UP_TO_32_BITS)
    n_threads = use_threads(10 * x_TE.numel() * a_NE.shape[0])
    if state.tail is not None:
        rings, old, new, spans = arrays_of(state.tail)
        behind = decoded_channels(state) if has_8_bits(state) else state
        scan_channels(
            *(as_array(t.contiguous()) for t in (x_TE, dt_TE)), as_array(dt_bias_E),
            *(as_array(t.contiguous()) for t in (b_TN, c_TN)), as_array(a_NE), as_array(d_E), *places_of(behind),
            rings, old, new, state.tail.ring_rows, *spans, y_TE.numpy(),
        )  # fmt: skip
        if behind is not state:
            encode_channels(behind, state)
        return y_TE
    at_once = channels_at_once(state.cu_rows.host, x_TE.shape[0], x_TE.shape[1], n_threads)
    if x_TE.dtype is dt_TE.dtype is b_TN.dtype is c_TN.dtype:
        inputs = [t if t.is_contiguous() else t.contiguous() for t in (x_TE, dt_TE, b_TN, c_TN)]
    else:
        inputs = [t.float().contiguous() for t in (x_TE, dt_TE, b_TN, c_TN)]
    own = opened(state)
    scan_at(
        *(t.data_ptr() for t in inputs), LIKE[inputs[0].dtype], len(x_TE), as_array(dt_bias_E), as_array(a_NE),
        as_array(d_E), own.cu_rows.host, as_array(own.flat), as_array(own.sources), as_array(own.targets),
        np.float32(own.initial), _FLOATS, y_TE.data_ptr(), at_once,
    )  # fmt: skip
    close(own, state)
    return y_TE


@compiled(ELEMENTWISE, parallel=True)
def scan_at(
    x_at, dt_at, b_at, c_at, like, n_rows, dt_bias_E, a_NE, d_E, cu_rows, flat, sources, targets, initial, floats,
    y_at, at_once,
):  # fmt: skip
    n_states, n_channels = a_NE.shape
    x_TE = array_at(x_at, n_rows * n_channels, like).reshape((n_rows, n_channels))
    dt_TE = array_at(dt_at, n_rows * n_channels, like).reshape((n_rows, n_channels))
    b, c = array_at(b_at, n_rows * n_states, like), array_at(c_at, n_rows * n_states, like)
    y_TE = array_at(y_at, n_rows * n_channels, floats).reshape((n_rows, n_channels))
    n_chunks = -(-n_channels // at_once)
    for task in prange((len(cu_rows) - 1) * n_chunks):
        i, first = task // n_chunks, (task % n_chunks) * at_once
        last = min(first + at_once, n_channels)
        source, target, width = sources[i] + first, targets[i] + first, last - first
        # The state is copied into its target, and advanced there.
        for n in range(n_states):
            h = flat[target + n * n_channels : target + n * n_channels + width]
            if source < first:
                h[:] = initial
            elif source != target:
                copy_(h, flat[source + n * n_channels : source + n * n_channels + width])
        dt, dtx = np.empty(width, np.float32), np.empty(width, np.float32)
        for t in range(cu_rows[i], cu_rows[i + 1]):
            x, y = x_TE[t, first:last], y_TE[t, first:last]
            _time_step(dt_TE[t, first:last], dt_bias_E[first:last], x, dt, dtx)
            _product(d_E[first:last], x, y)
            for n in range(n_states):
                h = flat[target + n * n_channels : target + n * n_channels + width]
                _advance_(h, y, dt, dtx, a_NE[n, first:last], get(b, t * n_states + n), get(c, t * n_states + n))


@subroutine(ELEMENTWISE)
def _time_step(raw, bias, x, dt, dtx):
    """Compute dt in units of ln 2, so that exp(dt A) is a power of two, and dt x."""
    for e in range(len(dt)):
        step = softplus_f32(get(raw, e) + get(bias, e))
        dt[e] = step * LOG2_E
        dtx[e] = step * get(x, e)


@subroutine(ELEMENTWISE)
def _product(a, b, out):
    for e in range(len(out)):
        out[e] = get(a, e) * get(b, e)


@subroutine(ELEMENTWISE)
def _advance_(h, y, dt, dtx, a, b, c):
    for e in range(len(h)):
        h_new = exp2_f32(dt[e] * get(a, e)) * h[e] + dtx[e] * b
        h[e] = h_new
        y[e] += h_new * c
