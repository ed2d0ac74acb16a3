"""Computes the stabiliser of exponential gates (xLSTM), the greatest exponent that a sum holds so far, on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.numbers import get, put
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, subroutine
from hybridmem.memory.kernels.cpu.tail_states import arrays_of, places_of
from hybridmem.memory.kernels.cpu.vector_math import exp_f32
from hybridmem.memory.kernels.signature import StateSlots

_NO_NUMBERS = np.zeros(0, np.int64)


def stabilise(gate_TH: Tensor, log_decay_TH: Tensor, state: StateSlots) -> Tensor:
    checks.stabilise(gate_TH, log_decay_TH, state, checks.FLOATS_UP_TO_32_BITS)
    out_3TH = torch.empty(3, *gate_TH.shape)
    gate, log_decay = (x.float().contiguous().numpy() for x in (gate_TH, log_decay_TH))
    places = places_of(state)
    if state.tail is None:
        none = _NO_NUMBERS
        _stabilise(gate, log_decay, *places, False, places[1], none, none, 1, none, none, none, out_3TH.numpy())
    else:
        ((ring,), (old,), (new,), spans) = arrays_of(state.tail)
        ring_rows = state.tail.ring_rows
        _stabilise(gate, log_decay, *places, True, ring, old, new, ring_rows, *spans, out_3TH.numpy())
    return out_3TH


@compiled(ELEMENTWISE)
def _stabilise(
    gate_TH, log_decay_TH, cu_rows, flat, sources, targets, initial, has_tail, ring, old, new, ring_rows, firsts,
    counts, folds, out_3TH,
):  # fmt: skip
    """Advance the stabiliser m of each head by a segment's tokens. This is too little work for several threads."""
    n_heads = gate_TH.shape[1]
    m = np.empty(n_heads, np.float32)
    for i in range(len(cu_rows) - 1):
        start, end, moves = cu_rows[i], cu_rows[i + 1], targets[i] >= 0
        count = counts[i] if has_tail else 0
        first = firsts[i] if has_tail else 0
        fold = folds[i] if has_tail else end - start
        if moves and fold < count:
            # The new body is inside the tail, and the ring holds m there.
            if fold == 0:
                _read_(m, flat, sources[i], initial)
            else:
                _read_(m, ring, old[i] + (first + fold - 1) % ring_rows * n_heads, initial)
            _write_(flat, targets[i], m)
        if count > 0:
            _read_(m, ring, old[i] + (first + count - 1) % ring_rows * n_heads, initial)
        else:
            _read_(m, flat, sources[i], initial)
        for t in range(start, end + 1):
            p = count + t - start
            if moves and p == fold:
                _write_(flat, targets[i], m)
            if t == end:
                break
            _advance_(m, gate_TH[t], log_decay_TH[t], out_3TH[0, t], out_3TH[1, t], out_3TH[2, t])
            if has_tail and (not moves or p >= fold):
                _write_(ring, new[i] + (first + p) % ring_rows * n_heads, m)


@subroutine()
def _read_(m, flat, at, initial):
    for h in range(len(m)):
        m[h] = initial if at < 0 else get(flat, at + h)


@subroutine()
def _write_(flat, at, m):
    for h in range(len(m)):
        put(flat, at + h, m[h])


@subroutine(ELEMENTWISE)
def _advance_(m, gate, log_decay, fade, strength, floor):
    for h in range(len(m)):
        faded = log_decay[h] + m[h]
        highest = max(faded, gate[h])
        fade[h] = faded - highest
        strength[h] = exp_f32(gate[h] - highest)
        floor[h] = exp_f32(-highest)
        m[h] = highest
