"""Computes recurrences with a few numbers per channel as state (RG-LRU, RWKV-4), and softplus for gates, on the CPU.
A task is one segment, over some of the channels.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.numbers import get
from hybridmem.memory.kernels.cpu.rows import as_array, close, copy_, opened
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, subroutine
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.cpu.vector_math import exp_f32, softplus_f32
from hybridmem.memory.kernels.signature import Prepared, StateSlots

_AT_ONCE = 128
"""How many channels a task has."""


def softplus(x_TH: Tensor, bias_H: Prepared) -> Tensor:
    checks.softplus(x_TH, bias_H, checks.FLOATS_UP_TO_32_BITS)
    out_TH = torch.empty(x_TH.shape)
    softplus_rows(as_array(x_TH.contiguous()), as_array(bias_H), out_TH.numpy())
    return out_TH


@compiled(ELEMENTWISE)
def softplus_rows(x_TH, bias_H, out_TH):
    for t in range(len(x_TH)):
        x, out = x_TH[t], out_TH[t]
        for h in range(len(out)):
            out[h] = softplus_f32(get(x, h) + get(bias_H, h))


def linear_scan(x_TE: Tensor, decay_TE: Tensor, state: StateSlots) -> Tensor:
    checks.linear_scan(x_TE, decay_TE, state, checks.FLOATS_UP_TO_32_BITS)
    y_TE = torch.empty(x_TE.shape)
    use_threads(2 * x_TE.numel())
    x, decay, own = (*(t.float().contiguous().numpy() for t in (x_TE, decay_TE)), opened(state))
    _linear_scan(
        x, decay, own.cu_rows.host, as_array(own.flat), as_array(own.sources), as_array(own.targets),
        np.float32(own.initial), y_TE.numpy(),
    )  # fmt: skip
    close(own, state)
    return y_TE


@compiled(ELEMENTWISE, parallel=True)
def _linear_scan(x_TE, decay_TE, cu_rows, flat, sources, targets, initial, y_TE):
    n_channels = x_TE.shape[1]
    n_chunks = -(-n_channels // _AT_ONCE)
    for task in prange((len(cu_rows) - 1) * n_chunks):
        i, first = task // n_chunks, task % n_chunks * _AT_ONCE
        last = min(first + _AT_ONCE, n_channels)
        h = flat[targets[i] + first : targets[i] + last]
        if sources[i] < 0:
            h[:] = initial
        elif sources[i] != targets[i]:
            copy_(h, flat[sources[i] + first : sources[i] + last])
        for t in range(cu_rows[i], cu_rows[i + 1]):
            _fade_and_add_(h, decay_TE[t, first:last], x_TE[t, first:last])
            copy_(y_TE[t, first:last], h)


@subroutine(ELEMENTWISE)
def _fade_and_add_(h, decay, x):
    for e in range(len(h)):
        h[e] = decay[e] * h[e] + x[e]


@cache
def _numbers(*numbers: float) -> np.ndarray:
    """Return an array of numbers.

    For equal numbers it is the same array, because a step is recorded only if its arrays stay the same.
    """
    return np.array(numbers, np.float32)


def wkv4(k_TE: Tensor, v_TE: Tensor, decay_E: Prepared, first_E: Prepared, states: tuple[StateSlots, ...]) -> Tensor:
    checks.wkv4(k_TE, v_TE, decay_E, first_E, states, checks.FLOATS_UP_TO_32_BITS)
    y_TE = torch.empty(v_TE.shape)
    use_threads(40 * v_TE.numel())
    k, v = (t.float().contiguous().numpy() for t in (k_TE, v_TE))
    top, below, exponent = own = tuple(map(opened, states))
    _wkv4(
        k, v, as_array(decay_E), as_array(first_E), top.cu_rows.host,
        as_array(top.flat), as_array(top.sources), as_array(top.targets), as_array(below.flat), as_array(below.sources),
        as_array(below.targets), as_array(exponent.flat), as_array(exponent.sources), as_array(exponent.targets),
        _numbers(top.initial, below.initial, exponent.initial), y_TE.numpy(),
    )  # fmt: skip
    for sums, state in zip(own, states, strict=True):
        close(sums, state)
    return y_TE


@compiled(ELEMENTWISE, parallel=True)
def _wkv4(
    k_TE, v_TE, decay_E, first_E, cu_rows, top_flat, top_sources, top_targets, below_flat, below_sources, below_targets,
    exponent_flat, exponent_sources, exponent_targets, initial, y_TE,
):  # fmt: skip
    n_channels = k_TE.shape[1]
    n_chunks = -(-n_channels // _AT_ONCE)
    for task in prange((len(cu_rows) - 1) * n_chunks):
        i, first = task // n_chunks, task % n_chunks * _AT_ONCE
        last = min(first + _AT_ONCE, n_channels)
        # These are copies, because the compiler cannot know that the three states do not overlap in the arena.
        top = np.empty(last - first, np.float32)
        below = np.empty(last - first, np.float32)
        exponent = np.empty(last - first, np.float32)
        _start_(top, top_flat, top_sources[i], first, initial[0])
        _start_(below, below_flat, below_sources[i], first, initial[1])
        _start_(exponent, exponent_flat, exponent_sources[i], first, initial[2])
        for t in range(cu_rows[i], cu_rows[i + 1]):
            k, v, y = k_TE[t, first:last], v_TE[t, first:last], y_TE[t, first:last]
            _average_(top, below, exponent, k, v, decay_E[first:last], first_E[first:last], y)
        copy_(top_flat[top_targets[i] + first : top_targets[i] + last], top)
        copy_(below_flat[below_targets[i] + first : below_targets[i] + last], below)
        copy_(exponent_flat[exponent_targets[i] + first : exponent_targets[i] + last], exponent)


@subroutine()
def _start_(own, flat, source, first, initial):
    """Read the channels of a state from `first` on.

    Each state has its own source, because some are copies in float32.
    """
    if source < 0:
        own[:] = initial
    else:
        copy_(own, flat[source + first : source + first + len(own)])


@subroutine(ELEMENTWISE)
def _average_(top, below, exponent, k, v, decay, first, y):
    for e in range(len(y)):
        highest = max(exponent[e], k[e] + first[e])
        old, new = exp_f32(exponent[e] - highest), exp_f32(k[e] + first[e] - highest)
        y[e] = (old * top[e] + new * v[e]) / (old * below[e] + new)
        highest = max(exponent[e] + decay[e], k[e])
        old, new = exp_f32(exponent[e] + decay[e] - highest), exp_f32(k[e] - highest)
        top[e] = old * top[e] + new * v[e]
        below[e] = old * below[e] + new
        exponent[e] = highest
