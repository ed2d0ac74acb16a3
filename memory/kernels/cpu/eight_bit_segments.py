"""Runs `matrix_scan` over bodies of 8 bits on the CPU.

Short segments read the codes. Long segments first decode the body to floats.

How a segment is computed depends on its own length alone, so its bits do not depend on the others of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.staging import object_to_replays, place
from hybridmem.memory.kernels.cpu.eight_bit_rows import LARGEST_CODES, decode, encode
from hybridmem.memory.kernels.cpu.eight_bit_states import SHORT, multiply_keys, read_states
from hybridmem.memory.kernels.cpu.rows import as_array
from hybridmem.memory.kernels.cpu.tail_states import arrays_of
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.cpu.vectors import LANES
from hybridmem.memory.kernels.signature import Erase, Prepared, StateSlots

_NO_ROWS, _NO_FACTORS, _NO_SKIP = (np.zeros((0,) * n, np.float32) for n in (3, 2, 1))

Scan = Callable[..., None]
"""The function that runs over float32 states behind a tail: `matrix_states._scan_behind_tail`."""


def scan_8_bits(
    q_TGN: Tensor, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, erase: Erase | None, state: StateSlots,
    strength_TH: Tensor | None, skip_H: Prepared | None, y_THV: Tensor, scan: Scan,
) -> None:  # fmt: skip
    """Set y (T, H, V) to what `matrix_scan` returns, and write new bodies."""
    cu_rows = state.cu_rows.host
    can_read = log_decay.dim() == 2 and q_TGN.shape[1] == k_TGN.shape[1] and q_TGN.shape[2] % LANES == 0
    can_read = can_read and (erase is None or (erase.b is None and erase.a.shape[1] == k_TGN.shape[1]))
    is_short = np.diff(cu_rows) <= SHORT if can_read else np.zeros(len(cu_rows) - 1, bool)
    if is_short.any():
        a = erase.a.float().contiguous().numpy() if erase is not None else _NO_ROWS
        strength = _NO_FACTORS if strength_TH is None else strength_TH.float().contiguous().numpy()
        q, k, v, decay = (x.float().contiguous().numpy() for x in (q_TGN, k_TGN, v_THV, log_decay))
        _read(
            q, k, v, decay, a,
            erase is not None and erase.after_decay, strength, _NO_SKIP if skip_H is None else as_array(skip_H), state,
            y_THV.numpy(),
        )  # fmt: skip
    if not is_short.all():
        object_to_replays(
            "where the states of 8 bits are that it decodes is asked on the host, and differs by the step"
        )
    for i in np.flatnonzero(~is_short).tolist():
        own = slice(int(cu_rows[i]), int(cu_rows[i + 1]))
        erase_own = None if erase is None else Erase(
            erase.a[own], None if erase.b is None else erase.b[own], erase.after_decay
        )  # fmt: skip
        strength_own = None if strength_TH is None else strength_TH[own]
        decoded = _decoded(state, i, own.stop - own.start)
        inputs = q_TGN[own], k_TGN[own], v_THV[own], log_decay[own], erase_own, decoded
        scan(*inputs, strength_own, skip_H, y_THV[own])
        _encode(decoded, state, i)


def _read(
    q_TGN: np.ndarray, k_TGN: np.ndarray, v_THV: np.ndarray, log_decay_TH: np.ndarray, a_TGN: np.ndarray,
    after_decay: bool, strength_TH: np.ndarray, skip_H: Prepared, state: StateSlots, y_THV: np.ndarray,
) -> None:  # fmt: skip
    tail, cu_rows, codes = state.tail, state.cu_rows.host, as_array(state.flat)
    assert tail is not None, "states of 8 bits come before tails"
    rings, old, new, spans = arrays_of(tail)
    (n_tokens, n_groups, n_columns), most = q_TGN.shape, tail.ring_rows + SHORT
    # These are tensors, because a recording of a step knows where the step's tensors are.
    keys, products = torch.empty(k_TGN.shape).numpy(), torch.empty(n_tokens, n_groups, 2, most).numpy()
    sources, targets = as_array(state.sources), as_array(state.targets)
    use_threads(n_tokens * n_groups * n_columns * tail.ring_rows)
    multiply_keys(
        q_TGN, k_TGN, a_TGN, cu_rows, targets, rings[0], old[0], new[0], tail.ring_rows, spans, keys,
        products,
    )  # fmt: skip
    use_threads(v_THV.size * n_columns)
    read_states(
        q_TGN, v_THV, log_decay_TH, a_TGN, after_decay, strength_TH, skip_H, cu_rows, codes, sources,
        targets, LARGEST_CODES[codes.dtype], keys, products, rings, old, new, tail.ring_rows, spans, y_THV,
    )  # fmt: skip


def _decoded(state: StateSlots, run: int, n_tokens: int) -> StateSlots:
    """Return the slots of one segment with its state in float32, and room for its new body after it."""
    n, tail, source = math.prod(state.shape), state.tail, int(as_array(state.sources)[run])
    assert tail is not None, "states of 8 bits come before tails"
    flat = np.empty(2 * n, np.float32)
    if source >= 0:
        use_threads(n)
        decode(as_array(state.flat), source, flat[:n].reshape(-1, state.shape[-1]))
    one = slice(run, run + 1)
    sources, targets = (tuple(as_array(x)[one] for x in parts) for parts in (tail.sources, tail.targets))
    spans = (as_array(x)[one] for x in (tail.firsts, tail.counts, tail.folds))
    moves = as_array(state.targets)[one] >= 0
    return StateSlots(
        place(np.array([0, n_tokens]), torch.device("cpu")), flat, np.where(source < 0, -1, np.zeros(1, np.int64)),
        np.where(moves, n, -1), state.shape, state.initial, tail._replace(sources=sources, targets=targets,
        firsts=next(spans), counts=next(spans), folds=next(spans)),
    )  # fmt: skip


def _encode(decoded: StateSlots, state: StateSlots, run: int) -> None:
    tail, target, codes = decoded.tail, int(as_array(state.targets)[run]), as_array(state.flat)
    if target >= 0 and tail is not None:
        use_threads(math.prod(state.shape))
        body = decoded.flat[math.prod(state.shape) :].reshape(-1, state.shape[-1])
        encode(body, LARGEST_CODES[codes.dtype], int(tail.firsts[0] + tail.folds[0]), codes, target)
