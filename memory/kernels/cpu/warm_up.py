"""Compiles the CPU kernels before they are needed."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import torch

from memory.blocks.staging import place
from memory.kernels.cpu.attention import paged_attention
from memory.kernels.cpu.channel_states import linear_scan, softplus, wkv4
from memory.kernels.cpu.matrix_states import matrix_scan
from memory.kernels.cpu.norms import rms_norm
from memory.kernels.cpu.page_choice import choose_pages
from memory.kernels.cpu.recurrences import causal_conv, selective_scan
from memory.kernels.cpu.rows import read_rows, write_rows_
from memory.kernels.signature import FoldedRows, PageChoice, PagedBatch, Scoring, StateSlots
from memory.quantization import Float8

_LOG = logging.getLogger("memory")
_SILENT_SECONDS = 1.0
"""Loading compiled kernels from disk takes less."""

_is_warm = False


def warm_up() -> float:
    """Run every kernel once on tiny inputs, which compiles those that are not on disk; returns the seconds it took.

    The first memory of a process calls this, so that no step has to wait for the compiler; a warning says why it takes
    long.
    """
    global _is_warm
    if _is_warm:
        return 0.0
    message = "compiling CPU kernels for this machine, once, up to a minute; `hybrid-memory warmup` does it ahead"
    timer = threading.Timer(_SILENT_SECONDS, _LOG.warning, [message])
    timer.start()
    started = time.perf_counter()
    try:
        _run_all()
    finally:
        timer.cancel()
    _is_warm = True
    return time.perf_counter() - started


def _run_all() -> None:
    flat, offsets, cu = torch.zeros(64), torch.zeros(1, dtype=torch.int64), np.arange(2)
    one_run = place(cu, torch.device("cpu"))
    rows, b, a = torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(3, 2)
    write_rows_(flat, offsets, rows)
    read_rows(flat, offsets, (2,), 0.0)
    causal_conv(rows, torch.zeros(2, 2), None, StateSlots(one_run, flat, offsets, offsets, (1, 2), 0.0))
    selective_scan(rows, rows, rows[0], b, b, a, rows[0], StateSlots(one_run, flat, offsets, offsets, (3, 2), 0.0))
    batch = PagedBatch(cu, np.ones(1, np.int64), offsets, cu, page_tokens=1)
    codes = torch.zeros(64, dtype=torch.uint8)
    folded = FoldedRows(Float8(), ((1, 1, 2), (1, 1, 2)), (codes, codes), offsets, cu, np.ones(1, np.int64), 2)
    for old in (None, folded):
        paged_attention(torch.zeros(1, 1, 2), flat, flat, batch, 1, Scoring(1.0), old)
    choose_pages(torch.zeros(1, 1, 2), flat, flat, PageChoice(offsets, cu, 0, np.ones(1, np.int64), cu), 1)
    vector = StateSlots(one_run, flat, offsets, offsets, (2,), 0.0)
    rms_norm(rows, None, 1.0)
    softplus(rows, rows[0])
    linear_scan(rows, rows, vector)
    wkv4(rows, rows, rows[0], rows[0], (vector, vector, vector))
    x = rows[:, None]
    matrix_scan(x, x, x, rows[:, :1], None, StateSlots(one_run, flat, offsets, offsets, (1, 2, 2), 0.0))
