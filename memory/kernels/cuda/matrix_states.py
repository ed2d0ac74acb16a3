"""Chooses the kernel for recurrences with matrix states (Mamba-2, delta rules, RWKV-7), on the GPU.

matrix_tokens   any recurrence, a few tokens, one by one; the state goes through registers once
matrix_columns  any recurrence, many tokens: 16 at once, as products of matrices
matrix_chunks   one decay a head, many tokens: 32 at once, as products of matrices
matrix_tails    one decay a head, a few tokens after a tail: the state is read once, and not written

States of 8 bits are read as they are by `matrix_tails`, and through float32 copies by the others (`eight_bits`).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cuda.eight_bits import codes_of, decode, encode, room_for_copies
from hybridmem.memory.kernels.cuda.matrix_chunks import scan_chunks
from hybridmem.memory.kernels.cuda.matrix_columns import scan_columns
from hybridmem.memory.kernels.cuda.matrix_inputs import Inputs, part_of
from hybridmem.memory.kernels.cuda.matrix_tails import FEW_TOKENS, read_states
from hybridmem.memory.kernels.cuda.matrix_tokens import scan_tokens
from hybridmem.memory.kernels.signature import Erase, Prepared, StateSlots

_LONG_RUN = FEW_TOKENS + 1
"""A segment of at least this many tokens is divided into chunks."""


def matrix_scan(
    q_TGN: Tensor, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, erase: Erase | None, state: StateSlots, *,
    strength_TH: Tensor | None = None, skip_H: Prepared | None = None,
) -> Tensor:  # fmt: skip
    checks.matrix_scan(q_TGN, k_TGN, v_THV, log_decay, erase, state, strength_TH, skip_H, checks.FLOATS)
    is_simple = log_decay.dim() == 2 and (erase is None or (erase.b is None and erase.after_decay))
    y_THV = torch.empty(v_THV.shape, dtype=torch.float32, device=v_THV.device)
    inputs = Inputs.of(q_TGN, k_TGN, v_THV, log_decay, erase, strength_TH, skip_H)
    # If tokens fold, `read_states` reads their updates from their ring again, so the tokens of a segment need separate
    # slots in the ring. Chunks keep updates elsewhere.
    least = min(_LONG_RUN, state.tail.ring_rows + 1) if state.tail is not None and is_simple else _LONG_RUN
    is_long = np.diff(state.cu_rows.host) >= least
    # Requests mostly come with the shortest first, so neighbours with the same kernel share a launch.
    cu_rows = state.cu_rows.device
    bounds = [0, *(np.flatnonzero(np.diff(is_long)) + 1).tolist(), len(is_long)]
    scan_many = scan_chunks if is_simple else scan_columns
    copies = room_for_copies(state) if codes_of(state) else state
    for begin, end in pairwise(bounds):
        is_whole = (begin, end) == (0, len(is_long))
        bodies = state if is_whole else part_of(state, begin, end)
        some = bodies if copies is state else copies if is_whole else part_of(copies, begin, end)
        rows = cu_rows[begin : end + 1]
        if is_simple and state.tail is not None and not is_long[begin]:
            read_states(inputs, bodies, some, rows, y_THV)
            continue
        if copies is not state:
            decode(bodies, some)
        scan = scan_many if is_long[begin] else scan_tokens
        scan(inputs, some, rows, y_THV)
    if copies is not state:
        encode(copies, state)
    return y_THV
