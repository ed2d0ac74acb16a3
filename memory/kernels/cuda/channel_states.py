"""Selective scan: a few states for each channel. A program is one run over some of the channels, its states in registers."""

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
    channels = min(next_power_of_2(n_channels), most)
    launch(
        _selective_scan, (len(state.cu_rows) - 1, ceil_div(n_channels, channels)),
        x, x.stride(0), dt, dt.stride(0), b, b.stride(0), c, c.stride(0), dt_bias_E, a_NE, d_E, y_TE,
        device_ints(state.cu_rows, x.device), state.flat, state.sources, state.targets, float(state.initial), n_channels, n_states,
        CHANNELS=channels, STATES=states, num_warps=num_warps,
    )  # fmt: skip
    return y_TE


@triton.jit
def _selective_scan(  # type: ignore[no-untyped-def]
    x, x_stride, dt, dt_stride, b, b_stride, c, c_stride, dt_bias, a, d, y, cu_rows, flat, sources, targets, initial,
    n_channels, n_states, CHANNELS: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    channels, states = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, STATES)
    is_channel, is_state = channels < n_channels, states < n_states
    mask, at = is_state[:, None] & is_channel[None, :], states[:, None] * n_channels + channels[None, :]
    source, target = tl.load(sources + run), tl.load(targets + run)
    start = is_channel[None, :] & (states < bound(source, n_states))[:, None]
    h = tl.load(flat + source + at, mask=start, other=initial).to(tl.float32)
    rate = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + channels, mask=is_channel, other=0.0).to(tl.float32)
    skip = tl.load(d + channels, mask=is_channel, other=0.0).to(tl.float32)
    for t in range(tl.load(cu_rows + run), tl.load(cu_rows + run + 1)):
        new = tl.load(x + t * x_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        step = softplus(tl.load(dt + t * dt_stride + channels, mask=is_channel, other=0.0).to(tl.float32) + bias)
        key = tl.load(b + t * b_stride + states, mask=is_state, other=0.0).to(tl.float32)
        query = tl.load(c + t * c_stride + states, mask=is_state, other=0.0).to(tl.float32)
        h = tl.exp(step[None, :] * rate) * h + (step * new)[None, :] * key[:, None]
        tl.store(y + t * n_channels + channels, tl.sum(h * query[:, None], axis=0) + skip * new, mask=is_channel)
    tl.debug_barrier()  # every element of a state that is written in place has been read
    tl.store(flat + target + at, h.to(flat.dtype.element_ty), mask=is_channel[None, :] & (states < bound(target, n_states))[:, None])
