"""Computes Mamba-1's selective scan on the GPU.
A program computes one segment over some of the channels, with their states in registers. Chunks of longer segments run
in parallel, in two passes: first from states of zeros, to find what each chunk adds to the state. These additions are
then summed up, and each chunk runs again from the state before it.

With a tail, a program first adds the tail's tokens, from rings of x, dt and B. It writes its own tokens to the rings
and, if rows fold, writes a new body.
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
from hybridmem.memory.kernels.cuda.eight_bits import codes_of, decode, encode, room_for_copies
from hybridmem.memory.kernels.cuda.launch import launch, load_rows, next_power_of_2, with_contiguous_rows
from hybridmem.memory.kernels.cuda.math import bound, count_pieces, first_piece, run_of, softplus
from hybridmem.memory.kernels.cuda.prompts import scan_by_library
from hybridmem.memory.kernels.cuda.rings import keep_row, no_rings, rings_of
from hybridmem.memory.kernels.signature import Prepared, StateSlots

_BLOCK = tl.constexpr(4)
"""How many tokens of a tail are added at once: their terms for 16 states of 32 channels fit into a warp's registers."""


class SelectiveScan(NamedTuple):
    """Holds a choice for the scan: the most channels of a program, tokens of a chunk, and warps."""

    channels: int
    chunk: int
    num_warps: int


@tunable(
    "selective_scan",
    SelectiveScan,
    channels=powers_of_2(1, 512),
    chunk=powers_of_2(1, 1024),
    num_warps=powers_of_2(1, 16),
)
def _choose(n_states: int, itemsize: int) -> SelectiveScan:
    """Choose one warp and 16 registers per thread for states: 32 channels if each has 16 states."""
    return SelectiveScan(max(32, 512 // next_power_of_2(n_states)), 64, 1)


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
    checks.selective_scan(x_TE, dt_TE, dt_bias_E, b_TN, c_TN, a_NE, d_E, state, checks.FLOATS)
    n_channels, n_states = x_TE.shape[1], b_TN.shape[1]
    if codes_of(state):
        copies = room_for_copies(state)
        decode(state, copies)
        y_TE = selective_scan(x_TE, dt_TE, dt_bias_E, b_TN, c_TN, a_NE, d_E, copies)
        encode(copies, state)
        return y_TE
    if (by_library := scan_by_library(x_TE, dt_TE, dt_bias_E, b_TN, c_TN, a_NE, d_E, state)) is not None:
        return by_library
    y_TE = torch.empty(x_TE.shape, dtype=torch.float32, device=x_TE.device)
    x, dt, b, c = (with_contiguous_rows(t) for t in (x_TE, dt_TE, b_TN, c_TN))
    most, chunk, num_warps = _choose(x.device, n_states, x.element_size())
    channels, cu_rows = min(next_power_of_2(n_channels), most), state.cu_rows.device
    rings = no_rings(cu_rows, 3) if state.tail is None else rings_of(state.tail)
    n_runs, n_blocks = len(state.cu_rows.host) - 1, ceil_div(n_channels, channels)
    starts, n_pieces = y_TE, n_runs
    sizes: dict[str, Any] = {"CHANNELS": channels, "STATES": next_power_of_2(n_states), "num_warps": num_warps}
    if int(np.diff(state.cu_rows.host).max()) <= chunk:
        chunk = 0
    else:
        n_pieces = count_pieces(state.cu_rows.host, chunk, 1)
        starts, times = y_TE.new_empty(n_pieces, n_states, n_channels), y_TE.new_empty(n_pieces, n_channels)
        launch(
            _chunk_ends, (n_pieces, n_blocks), x, x.stride(0), dt, dt.stride(0), b, b.stride(0), dt_bias_E, a_NE,
            cu_rows, starts, times, n_runs, n_channels, n_states, CHUNK=chunk, **sizes,
        )  # fmt: skip
        launch(
            _chunk_starts, (n_runs, n_blocks), dt_bias_E, a_NE, cu_rows, state.flat, state.sources, state.targets,
            float(state.initial), *rings, starts, times, n_channels, n_states, HAS_TAIL=state.tail is not None,
            CHUNK=chunk, **sizes,
        )  # fmt: skip
    launch(
        _selective_scan, (n_pieces, n_blocks), x, x.stride(0), dt, dt.stride(0), b, b.stride(0), c, c.stride(0),
        dt_bias_E, a_NE, d_E, y_TE, cu_rows, state.flat, state.sources, state.targets, float(state.initial), *rings,
        starts, n_runs, n_channels, n_states, HAS_TAIL=state.tail is not None, CHUNK=chunk, **sizes,
    )  # fmt: skip
    return y_TE


@triton.jit
def _selective_scan(
    x, x_stride, dt, dt_stride, b, b_stride, c, c_stride, dt_bias, a, d, y, cu_rows, flat, sources, targets, initial,
    inputs, input_sources, input_targets, times, time_sources, time_targets, keys, key_sources, key_targets,
    ring_rows, firsts, counts, folds, starts, n_runs, n_channels, n_states,
    HAS_TAIL: tl.constexpr, CHUNK: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Compute a segment from its source state on, or one of its chunks from the state in `starts`."""
    run, chunk = tl.program_id(0), 0
    if CHUNK:
        run = run_of(tl.program_id(0), cu_rows, n_runs, CHUNK, 1)
        chunk = tl.program_id(0) - first_piece(run, cu_rows, CHUNK, 1)
    channels, states = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, STATES)
    is_channel, is_state = channels < n_channels, states < n_states
    mask, at = is_state[:, None] & is_channel[None, :], states[:, None] * n_channels + channels[None, :]
    source, target = tl.load(sources + run), tl.load(targets + run)
    limit = bound(target, n_states)
    rate = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + channels, mask=is_channel, other=0.0).to(tl.float32)
    skip = tl.load(d + channels, mask=is_channel, other=0.0).to(tl.float32)
    start, run_end = tl.load(cu_rows + run), tl.load(cu_rows + run + 1)
    begin, end = start, run_end
    if HAS_TAIL:
        first, count = tl.load(firsts + run).to(tl.int32), tl.load(counts + run).to(tl.int32)
        fold = tl.where(target < 0, -1, tl.load(folds + run).to(tl.int32))
    if CHUNK:
        begin = start + chunk * CHUNK
        end = tl.minimum(begin + CHUNK, run_end)
        h = tl.load(starts + tl.program_id(0).to(tl.int64) * n_states * n_channels + at, mask=mask, other=0.0)
    else:
        is_there = is_channel[None, :] & (states < bound(source, n_states))[:, None]
        h = tl.load(flat + source + at, mask=is_there, other=initial).to(tl.float32)
        if HAS_TAIL:
            h = _add_tail(
                h, flat + target + at, limit, fold, count, first, run, rate, bias, channels, states, inputs,
                input_sources, times, time_sources, keys, key_sources, ring_rows, n_channels, n_states,
            )  # fmt: skip
    for t in range(begin, end):
        new = tl.load(x + t * x_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        time = tl.load(dt + t * dt_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        key = tl.load(b + t * b_stride + states, mask=is_state, other=0.0).to(tl.float32)
        query = tl.load(c + t * c_stride + states, mask=is_state, other=0.0).to(tl.float32)
        if HAS_TAIL:
            p = (t - start).to(tl.int32) + count
            is_body = is_channel[None, :] & (states < tl.where(p == fold, limit, 0))[:, None]
            tl.store(flat + target + at, h.to(flat.dtype.element_ty), mask=is_body)
            # Rows are rounded as rings store them, so that a replay adds the same. Rings have no room for folded rows.
            slot, is_kept = (first + p) % ring_rows, p >= fold
            new = keep_row(inputs, input_targets, run, slot, new, channels, n_channels, is_kept)
            time = keep_row(times, time_targets, run, slot, time, channels, n_channels, is_kept)
            key = keep_row(keys, key_targets, run, slot, key, states, n_states, is_kept & (tl.program_id(1) == 0))
        h = _after(h, new, softplus(time + bias), key, rate)
        tl.store(y + t * n_channels + channels, tl.sum(h * query[:, None], axis=0) + skip * new, mask=is_channel)
    tl.debug_barrier()  # All threads have read the state, so it can be written in place.
    if HAS_TAIL:
        limit = tl.where(count + run_end - start == fold, limit, 0)
    if CHUNK:
        limit = tl.where((begin < run_end) & (end == run_end), limit, 0)
    tl.store(flat + target + at, h.to(flat.dtype.element_ty), mask=is_channel[None, :] & (states < limit)[:, None])


@triton.jit
def _chunk_ends(
    x, x_stride, dt, dt_stride, b, b_stride, dt_bias, a, cu_rows, ends, times, n_runs, n_channels, n_states,
    CHUNK: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Compute the state after each chunk from a state of zeros, and the sum of its time steps."""
    piece = tl.program_id(0)
    run = run_of(piece, cu_rows, n_runs, CHUNK, 1)
    channels, states = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, STATES)
    is_channel, is_state = channels < n_channels, states < n_states
    mask, at = is_state[:, None] & is_channel[None, :], states[:, None] * n_channels + channels[None, :]
    rate = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + channels, mask=is_channel, other=0.0).to(tl.float32)
    begin = tl.load(cu_rows + run) + (piece - first_piece(run, cu_rows, CHUNK, 1)) * CHUNK
    h, total = tl.zeros((STATES, CHANNELS), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    for t in range(begin, tl.minimum(begin + CHUNK, tl.load(cu_rows + run + 1))):
        new = tl.load(x + t * x_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        step = softplus(tl.load(dt + t * dt_stride + channels, mask=is_channel, other=0.0).to(tl.float32) + bias)
        key = tl.load(b + t * b_stride + states, mask=is_state, other=0.0).to(tl.float32)
        h, total = _after(h, new, step, key, rate), total + step
    tl.store(ends + piece.to(tl.int64) * n_states * n_channels + at, h, mask=mask)
    tl.store(times + piece.to(tl.int64) * n_channels + channels, total, mask=is_channel)


@triton.jit
def _chunk_starts(
    dt_bias, a, cu_rows, flat, sources, targets, initial,
    inputs, input_sources, input_targets, times, time_sources, time_targets, keys, key_sources, key_targets,
    ring_rows, firsts, counts, folds, starts, chunk_times, n_channels, n_states,
    HAS_TAIL: tl.constexpr, CHUNK: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Replace the end states of chunks that began with zeros by the state before each chunk, in place.

    For each chunk, h = exp(total time A) h + end.
    """
    run = tl.program_id(0)
    channels, states = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, STATES)
    is_channel, is_state = channels < n_channels, states < n_states
    mask, at = is_state[:, None] & is_channel[None, :], states[:, None] * n_channels + channels[None, :]
    source, target = tl.load(sources + run), tl.load(targets + run)
    rate = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
    is_there = is_channel[None, :] & (states < bound(source, n_states))[:, None]
    h = tl.load(flat + source + at, mask=is_there, other=initial).to(tl.float32)
    if HAS_TAIL:
        bias = tl.load(dt_bias + channels, mask=is_channel, other=0.0).to(tl.float32)
        fold = tl.where(target < 0, -1, tl.load(folds + run).to(tl.int32))
        count, first = tl.load(counts + run).to(tl.int32), tl.load(firsts + run).to(tl.int32)
        h = _add_tail(
            h, flat + target + at, bound(target, n_states), fold, count, first, run, rate, bias, channels, states,
            inputs, input_sources, times, time_sources, keys, key_sources, ring_rows, n_channels, n_states,
        )  # fmt: skip
    begin = first_piece(run, cu_rows, CHUNK, 1).to(tl.int64)
    n_rows = tl.load(cu_rows + run + 1) - tl.load(cu_rows + run)
    for piece in range(begin, begin + tl.cdiv(n_rows, CHUNK)):
        place = starts + piece * n_states * n_channels + at
        brought = tl.load(place, mask=mask, other=0.0)
        total = tl.load(chunk_times + piece * n_channels + channels, mask=is_channel, other=0.0)
        tl.store(place, h, mask=mask)
        h = tl.exp(total[None, :] * rate) * h + brought


@triton.jit
def _after(h, new, step, key, rate):
    return tl.exp(step[None, :] * rate) * h + (step * new)[None, :] * key[:, None]


@triton.jit
def _add_tail(
    h, body, limit, fold, count, first, run, rate, bias, channels, states, inputs, input_sources, times, time_sources,
    keys, key_sources, ring_rows, n_channels, n_states,
):  # fmt: skip
    """Advance a state (STATES, CHANNELS) by the `count` tokens of its tail, and store the state before token `fold`."""
    middle = tl.maximum(tl.minimum(fold, count), 0)
    inputs += tl.load(input_sources + run)
    times += tl.load(time_sources + run)
    keys += tl.load(key_sources + run)
    h = _add_tokens(
        h, 0, middle, first, rate, bias, channels, states, inputs, times, keys, ring_rows, n_channels, n_states
    )
    if middle == fold and fold < count:
        tl.debug_barrier()  # All threads have read the state, so it can be written in place.
        is_body = (channels < n_channels)[None, :] & (states < limit)[:, None]
        tl.store(body, h.to(body.dtype.element_ty), mask=is_body)
    return _add_tokens(
        h, middle, count, first, rate, bias, channels, states, inputs, times, keys, ring_rows, n_channels, n_states
    )


@triton.jit
def _add_tokens(
    h, begin, end, first, rate, bias, channels, states, inputs, times, keys, ring_rows, n_channels, n_states
):
    """Advance a state by tokens `begin` to `end` of its tail, `_BLOCK` at once, so that their rows are loaded together.

    The term of each token decays over the time steps of the tokens after it.
    """
    for start in range(begin, end, _BLOCK):
        p = start + tl.arange(0, _BLOCK)
        slots, is_token = (first + p) % ring_rows, p < end
        new = load_rows(inputs, n_channels, slots, is_token, channels, n_channels).to(tl.float32)
        time = load_rows(times, n_channels, slots, is_token, channels, n_channels).to(tl.float32)
        key = load_rows(keys, n_states, slots, is_token, states, n_states).to(tl.float32)
        step = tl.where(is_token[:, None], softplus(time + bias[None, :]), 0.0)
        later = tl.cumsum(step, axis=0, reverse=True) - step
        brought = tl.exp(later[:, None, :] * rate[None, :, :]) * (step * new)[:, None, :] * key[:, :, None]
        h = tl.exp(tl.sum(step, axis=0)[None, :] * rate) * h + tl.sum(brought, axis=0)
    return h
