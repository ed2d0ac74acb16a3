"""Computes recurrences for tokens that come after a tail (`memory.kernels.Tail`), on the CPU.

A state is read into a buffer, advanced by what the rings hold of the tail's tokens, and then by the new tokens. It is
written only if the body moves, as it was at the body's new position. A task is one segment, over some of the channels.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.numbers import get
from hybridmem.memory.kernels.cpu.rows import as_array, copy_, fill_
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, subroutine
from hybridmem.memory.kernels.cpu.vector_math import LOG2_E, exp2_f32, exp_f32, softplus_f32
from hybridmem.memory.kernels.signature import Prepared, StateSlots, Tail

AT_ONCE = 128
"""A task of a scan has so many channels."""
_CONVOLVED_AT_ONCE = 512
"""A task of a convolution has so many channels, because it has less to do with each of them than a task of a scan."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


def arrays_of(tail: Tail) -> tuple[Prepared, ...]:
    """Return the rings, their blocks to read and to write, and the other arrays of a tail that kernels need."""
    rings, sources, targets = (tuple(map(as_array, parts)) for parts in (tail.flats, tail.sources, tail.targets))
    return rings, sources, targets, tuple(as_array(x) for x in (tail.firsts, tail.counts, tail.folds))


def places_of(state: StateSlots) -> tuple[Prepared, ...]:
    """Return the arrays that kernels need of the states themselves."""
    arrays = (as_array(x) for x in (state.flat, state.sources, state.targets))
    return state.cu_rows.host, *arrays, np.float32(state.initial)


@compiled(ELEMENTWISE, parallel=True)
def convolve(
    rows_TR, weight_WE, bias_E, cu_rows, flat, sources, targets, initial, ring, blocks, ring_rows, firsts, counts,
    folds, out_TE, activation,
):  # fmt: skip
    """Convolve tokens after a tail whose ring holds whole rows (R). The first channels of a row are convolved."""
    n_taps, n_channels = weight_WE.shape
    n_chunks = -(-n_channels // _CONVOLVED_AT_ONCE)
    for task in prange((len(cu_rows) - 1) * n_chunks):
        i, first = task // n_chunks, (task % n_chunks) * _CONVOLVED_AT_ONCE
        last = min(first + _CONVOLVED_AT_ONCE, n_channels)
        start, count, fold, width = cu_rows[i], counts[i], folds[i], last - first
        n_seen = n_taps - 1 + count + cu_rows[i + 1] - start
        # The inputs seen so far, oldest first, are the window, the tail and the new rows.
        seen = np.empty((n_seen, width), np.float32)
        # Outputs read from `count` on, and a new window from the fold on. Nothing reads what is older.
        oldest = min(count, fold) if targets[i] >= 0 else count
        for j in range(oldest, n_taps - 1):
            if sources[i] < 0:
                fill_(seen[j], initial)
            else:
                at = sources[i] + j * n_channels
                copy_(seen[j], flat[at + first : at + last])
        for j in range(max(0, oldest - n_taps + 1), count):
            at = blocks[i] + (firsts[i] + j) % ring_rows * rows_TR.shape[1]
            copy_(seen[n_taps - 1 + j], ring[at + first : at + last])
        for j in range(n_seen - n_taps + 1 - count):
            copy_(seen[n_taps - 1 + count + j], rows_TR[start + j, first:last])
        out = np.empty(width, np.float32)
        for j in range(n_seen - n_taps + 1 - count):
            copy_(out, bias_E[first:last])
            for w in range(n_taps):
                _add_product_(out, weight_WE[w, first:last], seen[count + j + w])
            if activation:
                _silu_(out)
            copy_(out_TE[start + j, first:last], out)
        if targets[i] >= 0:
            for j in range(n_taps - 1):
                at = targets[i] + j * n_channels
                copy_(flat[at + first : at + last], seen[fold + j])


@subroutine(ELEMENTWISE)
def _add_product_(out, a, b):
    for e in range(len(out)):
        out[e] += get(a, e) * b[e]


@subroutine(ELEMENTWISE)
def _silu_(x):
    for e in range(len(x)):
        x[e] = x[e] / (_ONE + exp_f32(-x[e]))


@compiled(ELEMENTWISE, parallel=True)
def scan_channels(
    x_TE, dt_TE, bias_E, b_TN, c_TN, a_NE, d_E, cu_rows, flat, sources, targets, initial, rings, old, new, ring_rows,
    firsts, counts, folds, y_TE,
):  # fmt: skip
    """Advance Mamba-1's states. The rings hold x, dt and B."""
    n_states, n_channels = a_NE.shape
    n_chunks = -(-n_channels // AT_ONCE)
    ring_x, ring_dt, ring_b = rings
    for task in prange((len(cu_rows) - 1) * n_chunks):
        i, first = task // n_chunks, (task % n_chunks) * AT_ONCE
        last = min(first + AT_ONCE, n_channels)
        start, count, fold, width = cu_rows[i], counts[i], folds[i], last - first
        n_tokens, moves = count + cu_rows[i + 1] - start, targets[i] >= 0
        h_NE, b_N = np.empty((n_states, width), np.float32), np.empty(n_states, np.float32)
        x, dt, dtx = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
        y = np.empty(width, np.float32)
        for n in range(n_states):
            if sources[i] < 0:
                fill_(h_NE[n], initial)
            else:
                at = sources[i] + n * n_channels
                copy_(h_NE[n], flat[at + first : at + last])
        for p in range(n_tokens + 1):
            if moves and p == fold:
                for n in range(n_states):
                    at = targets[i] + n * n_channels
                    copy_(flat[at + first : at + last], h_NE[n])
            if p == n_tokens:
                break
            slot, t = (firsts[i] + p) % ring_rows, start + p - count
            if p < count:
                copy_(x, ring_x[old[0][i] + slot * n_channels + first : old[0][i] + slot * n_channels + last])
                copy_(dt, ring_dt[old[1][i] + slot * n_channels + first : old[1][i] + slot * n_channels + last])
                copy_(b_N, ring_b[old[2][i] + slot * n_states : old[2][i] + (slot + 1) * n_states])
            else:
                copy_(x, x_TE[t, first:last])
                copy_(dt, dt_TE[t, first:last])
                copy_(b_N, b_TN[t])
                if not moves or p >= fold:
                    copy_(ring_x[new[0][i] + slot * n_channels + first : new[0][i] + slot * n_channels + last], x)
                    copy_(ring_dt[new[1][i] + slot * n_channels + first : new[1][i] + slot * n_channels + last], dt)
                    if first == 0:
                        copy_(ring_b[new[2][i] + slot * n_states : new[2][i] + (slot + 1) * n_states], b_N)
            _time_step_(dt, bias_E[first:last], x, dtx)
            y[:] = _ZERO
            for n in range(n_states):
                c = get(c_TN[t], n) if p >= count else _ZERO
                _advance_channels_(h_NE[n], y, dt, dtx, a_NE[n, first:last], b_N[n], c)
            if p >= count:
                _add_product_(y, d_E[first:last], x)
                copy_(y_TE[t, first:last], y)


@subroutine(ELEMENTWISE)
def _time_step_(dt, bias, x, dtx):
    """Turn dt into steps in units of ln 2, and compute dt x."""
    for e in range(len(dt)):
        step = softplus_f32(dt[e] + get(bias, e))
        dt[e] = step * LOG2_E
        dtx[e] = step * x[e]


@subroutine(ELEMENTWISE)
def _advance_channels_(h, y, dt, dtx, a, b, c):
    for e in range(len(h)):
        h[e] = exp2_f32(dt[e] * get(a, e)) * h[e] + dtx[e] * b
        y[e] += h[e] * c
