"""Defines kernels of the CPU that give a row the same bits however many rows are computed together.

One kernel attends for single tokens, drafts, trees of drafts and prompts. For each query it reads rows in blocks that
begin at the query's first row, and forms every sum in one order, so that a query has the same bits whatever step it is
in. The other functions are those of `memory.kernels.cpu`, which take a prompt's tokens one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridmem.memory.errors import StepError
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cpu.channel_states import linear_scan, softplus, wkv4
from hybridmem.memory.kernels.cpu.matrix_states import matrix_scan
from hybridmem.memory.kernels.cpu.norms import norm_parts, rms_norm
from hybridmem.memory.kernels.cpu.page_choice import choose_pages
from hybridmem.memory.kernels.cpu.query_attention import attend_in_place, in_one_page, tree_attention
from hybridmem.memory.kernels.cpu.recurrences import causal_conv, selective_scan
from hybridmem.memory.kernels.cpu.row_choice import choose_rows
from hybridmem.memory.kernels.cpu.rows import (
    plan_attention,
    plan_choice,
    prepare,
    read_rows,
    write_rows_,
)
from hybridmem.memory.kernels.cpu.stabiliser import stabilise
from hybridmem.memory.kernels.signature import FoldedRows, PagedBatch, Prepared, Scoring

__all__ = [
    "attend_rows",
    "causal_conv",
    "choose_pages",
    "choose_rows",
    "linear_scan",
    "matrix_scan",
    "norm_parts",
    "paged_attention",
    "plan_attention",
    "plan_choice",
    "prepare",
    "read_rows",
    "rms_norm",
    "selective_scan",
    "softplus",
    "stabilise",
    "tree_attention",
    "wkv4",
    "write_rows_",
]


def paged_attention(
    q_THD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, n_kv_heads: int, scoring: Scoring,
    folded: FoldedRows | None = None,
) -> Tensor:  # fmt: skip
    if folded is not None:
        raise StepError("attention to rows that a storage keeps depends on how tokens are split into steps")
    checks.paged_attention(q_THD, batch, n_kv_heads, scoring, checks.FLOATS_UP_TO_32_BITS)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    attend_in_place(q_THD, keys, values, batch, n_kv_heads, scoring, out_THD)
    return out_THD


def attend_rows(
    q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, scoring: Scoring, batch: PagedBatch | None = None
) -> Tensor:
    checks.attend_rows(q_THD, k_RGD, v_RGD, scoring, checks.FLOATS_UP_TO_32_BITS)
    return paged_attention(q_THD, *in_one_page(len(q_THD), k_RGD, v_RGD), k_RGD.shape[1], scoring)
