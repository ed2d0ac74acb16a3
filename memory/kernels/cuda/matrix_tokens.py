"""Recurrences whose state is a matrix a head, token by token. A program is one run over some rows of one head's state, in registers.

So every state element is read once and written once, however many tokens a run has.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from memory.kernels.cuda.choices import powers_of_2, tunable
from memory.kernels.cuda.launch import absent, ceil_div, device_ints, launch, next_power_of_2
from memory.kernels.cuda.math import bound
from memory.kernels.cuda.matrix_inputs import Inputs, rows_a_program
from memory.kernels.signature import StateSlots


class ScanTokens(NamedTuple):
    """Rows of a head's state a program, and warps."""

    rows: int
    num_warps: int


@tunable("scan_tokens", ScanTokens, rows=powers_of_2(1, 128), num_warps=powers_of_2(1, 16))
def _choose(n_rows: int, n_columns: int, itemsize: int, erases: bool) -> ScanTokens:
    return ScanTokens(rows_a_program(n_rows, n_columns), 4)


def scan_tokens(inputs: Inputs, state: StateSlots, y_THV: Tensor) -> None:
    """`Kernels.matrix_scan`, one token after the other."""
    n_heads, n_rows, n_columns = inputs.sizes
    n_runs, b = len(state.cu_rows) - 1, absent(inputs.b, inputs.q)
    rows, num_warps = _choose(y_THV.device, n_rows, n_columns, inputs.v.element_size(), inputs.a is not None)
    launch(
        _scan_tokens, (ceil_div(n_rows, rows), n_heads, n_runs),
        *inputs.pointers, b, b.stride(0), y_THV,
        device_ints(state.cu_rows, y_THV.device), state.flat, state.sources, state.targets, float(state.initial), n_heads, n_rows,
        n_columns,
        **inputs.flags, BY_COLUMN=inputs.log_decay.dim() == 3, HAS_B=inputs.b is not None, AFTER_DECAY=inputs.after_decay,
        ROWS=rows, COLUMNS=next_power_of_2(n_columns), num_warps=num_warps,
    )  # fmt: skip


@triton.jit
def _scan_tokens(  # type: ignore[no-untyped-def]
    q, q_stride, q_heads, k, k_stride, k_heads, a, a_stride, a_heads, v, v_stride, log_decay, decay_stride, strength, strength_stride,
    skip, b, b_stride, y, cu_rows, flat, sources, targets, initial, n_heads, n_rows, n_columns,
    ERASES: tl.constexpr, HAS_STRENGTH: tl.constexpr, HAS_SKIP: tl.constexpr, BY_COLUMN: tl.constexpr, HAS_B: tl.constexpr,
    AFTER_DECAY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    h, run = tl.program_id(1), tl.program_id(2)
    r, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
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
