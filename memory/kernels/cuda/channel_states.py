"""Selective scan: a few states for each channel. A program is one run over some of the channels, its states in registers.

Behind a tail it begins with the tail's tokens, out of rings of x, dt and B, and writes only its own tokens and, now and then, a body.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from memory.kernels.cuda.choices import powers_of_2, tunable
from memory.kernels.cuda.launch import ceil_div, device_ints, launch, next_power_of_2, require_shapes, with_contiguous_rows
from memory.kernels.cuda.math import bound, softplus
from memory.kernels.cuda.prompts import scan_by_library
from memory.kernels.cuda.rings import keep_row, no_rings, ring_row, rings_of
from memory.kernels.signature import Prepared, StateSlots


class SelectiveScan(NamedTuple):
    """Channels of a program, at most, and warps."""

    channels: int
    num_warps: int


@tunable("selective_scan", SelectiveScan, channels=powers_of_2(1, 512), num_warps=powers_of_2(1, 16))
def _choose(n_states: int, itemsize: int) -> SelectiveScan:
    """One warp, 16 registers a thread: with 16 states a channel, 32 channels."""
    return SelectiveScan(max(32, 512 // next_power_of_2(n_states)), 1)


def selective_scan(
    x_TE: Tensor, dt_TE: Tensor, dt_bias_E: Prepared, b_TN: Tensor, c_TN: Tensor, a_NE: Prepared, d_E: Prepared, state: StateSlots
) -> Tensor:
    n_channels, n_states = x_TE.shape[1], b_TN.shape[1]
    require_shapes(
        "selective_scan", state=(state.shape, (n_states, n_channels)), a=(a_NE.shape, (n_states, n_channels)), dt=(dt_TE.shape, x_TE.shape),
        c=(c_TN.shape, b_TN.shape), dt_bias=(dt_bias_E.shape, (n_channels,)), d=(d_E.shape, (n_channels,)),
    )  # fmt: skip
    if (by_library := scan_by_library(x_TE, dt_TE, dt_bias_E, b_TN, c_TN, a_NE, d_E, state)) is not None:
        return by_library
    y_TE = torch.empty(x_TE.shape, dtype=torch.float32, device=x_TE.device)
    x, dt, b, c = (with_contiguous_rows(t) for t in (x_TE, dt_TE, b_TN, c_TN))
    states = next_power_of_2(n_states)
    most, num_warps = _choose(x.device, n_states, x.element_size())
    channels, cu_rows = min(next_power_of_2(n_channels), most), device_ints(state.cu_rows, x.device)
    rings = no_rings(cu_rows, 3) if state.tail is None else rings_of(state.tail)
    launch(
        _selective_scan, (len(state.cu_rows) - 1, ceil_div(n_channels, channels)),
        x, x.stride(0), dt, dt.stride(0), b, b.stride(0), c, c.stride(0), dt_bias_E, a_NE, d_E, y_TE,
        cu_rows, state.flat, state.sources, state.targets, float(state.initial), *rings, n_channels, n_states,
        HAS_TAIL=state.tail is not None, CHANNELS=channels, STATES=states, num_warps=num_warps,
    )  # fmt: skip
    return y_TE


@triton.jit
def _selective_scan(  # type: ignore[no-untyped-def]
    x, x_stride, dt, dt_stride, b, b_stride, c, c_stride, dt_bias, a, d, y, cu_rows, flat, sources, targets, initial,
    inputs, input_sources, input_targets, times, time_sources, time_targets, keys, key_sources, key_targets,
    ring_rows, firsts, counts, folds, n_channels, n_states, HAS_TAIL: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    channels, states = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, STATES)
    is_channel, is_state = channels < n_channels, states < n_states
    mask, at = is_state[:, None] & is_channel[None, :], states[:, None] * n_channels + channels[None, :]
    source, target = tl.load(sources + run), tl.load(targets + run)
    begins = is_channel[None, :] & (states < bound(source, n_states))[:, None]
    limit = bound(target, n_states)
    h = tl.load(flat + source + at, mask=begins, other=initial).to(tl.float32)
    rate = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + channels, mask=is_channel, other=0.0).to(tl.float32)
    skip = tl.load(d + channels, mask=is_channel, other=0.0).to(tl.float32)
    start, end = tl.load(cu_rows + run), tl.load(cu_rows + run + 1)
    if HAS_TAIL:
        first, count = tl.load(firsts + run).to(tl.int32), tl.load(counts + run).to(tl.int32)
        fold = tl.where(target < 0, -1, tl.load(folds + run).to(tl.int32))
        for p in range(count):
            is_body = is_channel[None, :] & (states < tl.where(p == fold, limit, 0))[:, None]
            tl.store(flat + target + at, h.to(flat.dtype.element_ty), mask=is_body)
            slot = (first + p) % ring_rows
            new = ring_row(inputs, input_sources, run, slot, channels, n_channels)
            step = softplus(ring_row(times, time_sources, run, slot, channels, n_channels) + bias)
            key = ring_row(keys, key_sources, run, slot, states, n_states)
            h = tl.exp(step[None, :] * rate) * h + (step * new)[None, :] * key[:, None]
    for t in range(start, end):
        new = tl.load(x + t * x_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        time = tl.load(dt + t * dt_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        key = tl.load(b + t * b_stride + states, mask=is_state, other=0.0).to(tl.float32)
        query = tl.load(c + t * c_stride + states, mask=is_state, other=0.0).to(tl.float32)
        if HAS_TAIL:
            p = (t - start).to(tl.int32) + count
            is_body = is_channel[None, :] & (states < tl.where(p == fold, limit, 0))[:, None]
            tl.store(flat + target + at, h.to(flat.dtype.element_ty), mask=is_body)
            # What is added is what rings remember. Tokens that the body holds already may have no slot of their own.
            slot, is_kept = (first + p) % ring_rows, p >= fold
            new = keep_row(inputs, input_targets, run, slot, new, channels, n_channels, is_kept)
            time = keep_row(times, time_targets, run, slot, time, channels, n_channels, is_kept)
            key = keep_row(keys, key_targets, run, slot, key, states, n_states, is_kept & (tl.program_id(1) == 0))
        step = softplus(time + bias)
        h = tl.exp(step[None, :] * rate) * h + (step * new)[None, :] * key[:, None]
        tl.store(y + t * n_channels + channels, tl.sum(h * query[:, None], axis=0) + skip * new, mask=is_channel)
    tl.debug_barrier()  # every element of a state that is written in place has been read
    if HAS_TAIL:
        limit = tl.where(count + end - start == fold, limit, 0)
    tl.store(flat + target + at, h.to(flat.dtype.element_ty), mask=is_channel[None, :] & (states < limit)[:, None])
