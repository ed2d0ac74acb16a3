"""Recurrences whose state is a matrix a head, token by token. A program is one run over some rows of one head's state, in registers.

So every state element is read once and written once, however many tokens a run has; `matrix_chunks` runs many tokens at once, and
`matrix_tails` reads states that stay where they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memory.kernels.cuda.launch import absent, ceil_div, device_ints, next_power_of_2, require_shapes, with_contiguous_rows
from memory.kernels.cuda.math import bound
from memory.kernels.signature import Erase, Prepared, StateSlots

_PROGRAMS = 4 * 132
"""That keep a device busy: an H100 or H200 has 132 multiprocessors."""


def rows_a_program(n_runs: int, n_heads: int, n_rows: int, n_columns: int) -> int:
    """Of a head's state: 32 KiB, less where there are few heads, and no rows that no head has."""
    rows = max(1, 8192 // next_power_of_2(n_columns))
    while rows > 8 and n_runs * n_heads * ceil_div(n_rows, rows) < _PROGRAMS:
        rows //= 2
    return min(rows, next_power_of_2(n_rows))


def require_matrix_shapes(
    q_TGN: Tensor, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, state: StateSlots, strength_TH: Tensor | None, skip_H: Prepared | None
) -> None:
    n_heads, n_rows, n_columns = v_THV.shape[1], v_THV.shape[2], q_TGN.shape[2]
    require_shapes(
        "matrix_scan", state=(state.shape, (n_heads, n_rows, n_columns)), keys=(k_TGN.shape[2:], (n_columns,)),
        log_decay=(log_decay.shape[1:2], (n_heads,)), skip=((n_heads,) if skip_H is None else skip_H.shape, (n_heads,)),
        strength=((n_heads,) if strength_TH is None else strength_TH.shape[1:], (n_heads,)),
    )  # fmt: skip


def scan_tokens(
    q_TGN: Tensor, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, erase: Erase | None, state: StateSlots,
    strength_TH: Tensor | None, skip_H: Prepared | None,
) -> Tensor:  # fmt: skip
    """`Kernels.matrix_scan`, one token after the other."""
    n_heads, n_rows, n_columns = v_THV.shape[1], v_THV.shape[2], q_TGN.shape[2]
    y_THV = torch.empty(v_THV.shape, dtype=torch.float32, device=v_THV.device)
    q, k, v, decay = (with_contiguous_rows(x) for x in (q_TGN, k_TGN, v_THV, log_decay))
    strength = q if strength_TH is None else with_contiguous_rows(strength_TH)
    a = q if erase is None else with_contiguous_rows(erase.a)
    b = q if erase is None or erase.b is None else with_contiguous_rows(erase.b)
    n_runs = len(state.cu_rows) - 1
    rows = rows_a_program(n_runs, n_heads, n_rows, n_columns)
    _scan_tokens[(n_runs, n_heads, ceil_div(n_rows, rows))](
        q, q.stride(0), n_heads // q.shape[1], k, k.stride(0), n_heads // k.shape[1], v, v.stride(0), decay, decay.stride(0),
        a, a.stride(0), n_heads // a.shape[1], b, b.stride(0), strength, strength.stride(0), absent(skip_H, q), y_THV,
        device_ints(state.cu_rows, q.device), state.flat, state.sources, state.targets, state.initial, n_heads, n_rows, n_columns,
        BY_COLUMN=log_decay.dim() == 3, ERASES=erase is not None, HAS_B=erase is not None and erase.b is not None,
        AFTER_DECAY=erase is not None and erase.after_decay, HAS_STRENGTH=strength_TH is not None, HAS_SKIP=skip_H is not None,
        ROWS=rows, COLUMNS=next_power_of_2(n_columns),
    )  # fmt: skip
    return y_THV


@triton.jit
def _scan_tokens(  # type: ignore[no-untyped-def]
    q, q_stride, q_heads, k, k_stride, k_heads, v, v_stride, log_decay, decay_stride, a, a_stride, a_heads, b, b_stride,
    strength, strength_stride, skip, y, cu_rows, flat, sources, targets, initial, n_heads, n_rows, n_columns,
    BY_COLUMN: tl.constexpr, ERASES: tl.constexpr, HAS_B: tl.constexpr, AFTER_DECAY: tl.constexpr, HAS_STRENGTH: tl.constexpr,
    HAS_SKIP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    run, h = tl.program_id(0), tl.program_id(1)
    r, n = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row, is_column = r < n_rows, n < n_columns
    at = (h * n_rows + r)[:, None] * n_columns + n[None, :]
    source, target = tl.load(sources + run), tl.load(targets + run)
    begins = (r < bound(source, n_rows))[:, None] & is_column[None, :]
    s = tl.load(flat + source + at, mask=begins, other=initial).to(tl.float32)
    for t in range(tl.load(cu_rows + run), tl.load(cu_rows + run + 1)):
        key = tl.load(k + t * k_stride + h // k_heads * n_columns + n, mask=is_column, other=0.0).to(tl.float32)
        query = tl.load(q + t * q_stride + h // q_heads * n_columns + n, mask=is_column, other=0.0).to(tl.float32)
        value = tl.load(v + t * v_stride + h * n_rows + r, mask=is_row, other=0.0).to(tl.float32)
        beta = 1.0
        if HAS_STRENGTH:
            beta = tl.load(strength + t * strength_stride + h).to(tl.float32)
        if BY_COLUMN:
            w = tl.exp(tl.load(log_decay + t * decay_stride + h * n_columns + n, mask=is_column, other=0.0).to(tl.float32))[None, :]
        else:
            w = tl.exp(tl.load(log_decay + t * decay_stride + h).to(tl.float32))
        decayed = s * w
        new = decayed + (beta * value)[:, None] * key[None, :]
        if ERASES:
            reading = tl.load(a + t * a_stride + h // a_heads * n_columns + n, mask=is_column, other=0.0).to(tl.float32)
            found = tl.sum((decayed if AFTER_DECAY else s) * reading[None, :], axis=1)
            writing = -beta * key
            if HAS_B:
                writing = tl.load(b + t * b_stride + h * n_columns + n, mask=is_column, other=0.0).to(tl.float32)
            new += found[:, None] * writing[None, :]
        s = new
        out = tl.sum(s * query[None, :], axis=1)
        if HAS_SKIP:
            out += tl.load(skip + h).to(tl.float32) * value
        tl.store(y + (t * n_heads + h) * n_rows + r, out, mask=is_row)
    tl.debug_barrier()  # every element of a state that is written in place has been read
    tl.store(flat + target + at, s.to(flat.dtype.element_ty), mask=(r < bound(target, n_rows))[:, None] & is_column[None, :])
