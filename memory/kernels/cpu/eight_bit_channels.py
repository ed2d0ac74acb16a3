"""Reads and writes states of 8 bits that have several numbers for each channel (Mamba-1), on the CPU.

The scan behind a tail runs over float32 states, so bodies are decoded before it. A scale belongs to one channel, whose
numbers are next to each other in the body, while the scan takes channels that are next to each other.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange

from hybridmem.memory.blocks.staging import object_to_replays
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.eight_bit_rows import LARGEST_CODES, decode_row, encode_row
from hybridmem.memory.kernels.cpu.rows import as_array
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, subroutine
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.eight_bits import SCALE_BYTES
from hybridmem.memory.kernels.signature import StateSlots

_AT_ONCE = 128
"""How many channels a task has."""


def decoded_channels(state: StateSlots) -> StateSlots:
    """Return slots of float32 copies of 8-bit states (N, E), with room for new bodies. `encode_channels` writes these.

    Raises StepError while a step is recorded, because a replay would have other copies.
    """
    object_to_replays("where the states of 8 bits are that it decodes is asked on the host, and differs by the step")
    n_states, size = len(state.cu_rows.host) - 1, math.prod(state.shape)
    flat = torch.empty(2 * n_states * size).numpy()
    sources, targets, places = as_array(state.sources), as_array(state.targets), np.arange(2 * n_states) * size
    use_threads(n_states * size)
    _decode(as_array(state.flat), sources, flat.reshape(2 * n_states, *state.shape))
    return state._replace(
        flat=flat, sources=np.where(sources < 0, -1, places[:n_states]),
        targets=np.where(targets < 0, -1, places[n_states:]),
    )  # fmt: skip


def encode_channels(decoded: StateSlots, state: StateSlots) -> None:
    """Write the new bodies that a scan has left in `decoded_channels(state)`."""
    tail, codes = state.tail, as_array(state.flat)
    assert tail is not None, "states of 8 bits come before tails"
    use_threads(len(decoded.flat))
    states = decoded.flat.reshape(-1, *state.shape)
    positions = as_array(tail.firsts) + as_array(tail.folds)
    _encode(states[len(states) // 2 :], LARGEST_CODES[codes.dtype], positions, codes, as_array(state.targets))


@compiled(ELEMENTWISE, parallel=True)
def _decode(codes, sources, states):
    n_numbers, n_channels = states.shape[1:]
    width, n_chunks = n_numbers + SCALE_BYTES, -(-n_channels // _AT_ONCE)
    for task in prange(len(sources) * n_chunks):
        i, first = task // n_chunks, task % n_chunks * _AT_ONCE
        if sources[i] >= 0:
            row = np.empty(n_numbers, np.float32)
            for e in range(first, min(first + _AT_ONCE, n_channels)):
                decode_row(codes, sources[i] + e * width, row)
                _put_channel(row, states[i], e)


@compiled(ELEMENTWISE, parallel=True)
def _encode(states, largest, positions, codes, targets):
    n_numbers, n_channels = states.shape[1:]
    width, n_chunks = n_numbers + SCALE_BYTES, -(-n_channels // _AT_ONCE)
    for task in prange(len(targets) * n_chunks):
        i, first = task // n_chunks, task % n_chunks * _AT_ONCE
        if targets[i] >= 0:
            row = np.empty(n_numbers, np.float32)
            for e in range(first, min(first + _AT_ONCE, n_channels)):
                _take_channel(states[i], e, row)
                encode_row(row, largest, codes, targets[i] + e * width, e, positions[i])


@subroutine()
def _put_channel(row, state_NE, e):
    for n in range(len(row)):
        state_NE[n, e] = row[n]


@subroutine()
def _take_channel(state_NE, e, row):
    for n in range(len(row)):
        row[n] = state_NE[n, e]
