"""Computes attention over pages on the CPU: few queries read pages in place, and many gather rows for torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.blocked import Rows, attend, blocks, causal_mask, sees_all
from hybridmem.memory.kernels.cpu.features import has_many_registers
from hybridmem.memory.kernels.cpu.folded_rows import attend_few_folded
from hybridmem.memory.kernels.cpu.query_attention import attend_in_place, in_one_page
from hybridmem.memory.kernels.cpu.rows import gather_rows
from hybridmem.memory.kernels.reference import row_reader
from hybridmem.memory.kernels.signature import FoldedRows, PagedBatch, Prepared, Scoring

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The operator that `scaled_dot_product_attention` calls on a CPU. It also returns the sums of weights."""

_FEW_QUERIES = 64 if has_many_registers() else 16
"""Requests with at most so many queries read pages in place."""
_MOST_IN_PLACE, _SHARE_SEEN = (512 if has_many_registers() else 0), 2
"""So do requests with more queries, up to the first number, if they see at most so many times as many rows. With
AVX-512, that is measured to take 0.5 to 0.8 of the time of torch's fused attention. It takes longer where a long
history is read.
"""
_FEW_FOLDED, _FEW_UNFUSED = 16, 32
"""The limit where a storage keeps rows, because each query decodes them anew; and the least limit for scores that
torch's fused attention cannot compute, because attention of several operators takes longer.
"""
_LEAST_QUERIES, _MOST_QUERIES, _ROWS, _MOST_ELEMENTS = 16, 1024, 1024, 1 << 22
"""The limits of one call with many queries: the number of queries, of rows, and of elements of the queries."""


def paged_attention(
    q_THD: Tensor,
    keys: Prepared,
    values: Prepared,
    batch: PagedBatch,
    n_kv_heads: int,
    scoring: Scoring,
    folded: FoldedRows | None = None,
) -> Tensor:
    checks.paged_attention(q_THD, batch, n_kv_heads, scoring, checks.FLOATS_UP_TO_32_BITS)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    counts = np.diff(batch.cu_seqlens)
    most = _FEW_QUERIES if folded is None else _FEW_FOLDED
    n_short = int(np.searchsorted(counts, most if _can_fuse(scoring) else max(most, _FEW_UNFUSED), side="right"))
    if n_short:
        short = batch if n_short == len(counts) else batch.first(n_short)
        if folded is not None:
            attend_few_folded(q_THD, keys, values, short, n_kv_heads, scoring, folded, out_THD)
        else:
            attend_in_place(q_THD, keys, values, short, n_kv_heads, scoring, out_THD)
    for i in range(n_short, len(counts)):
        own = slice(*batch.cu_seqlens[i : i + 2].tolist())
        if (folded is None or not folded.lengths[i]) and _is_in_place(int(counts[i]), batch.kv_lengths[i], scoring):
            attend_in_place(q_THD[own], keys, values, batch.only(i), n_kv_heads, scoring.of(own), out_THD[own])
            continue
        n_rows, read = row_reader(gather_rows, keys, values, batch, i, n_kv_heads, q_THD.shape[2], folded)
        _attend_many(q_THD[own], n_rows, n_kv_heads, read, scoring.of(own), out_THD[own])
    return out_THD


def _is_in_place(n_queries: int, n_rows: int, scoring: Scoring) -> bool:
    """Return whether a request whose rows are all in pages reads them in place."""
    n_seen = n_rows if scoring.window is None else min(n_rows, scoring.window + n_queries)
    return n_queries <= _FEW_QUERIES or (n_queries <= _MOST_IN_PLACE and n_seen <= _SHARE_SEEN * n_queries)


def _can_fuse(scoring: Scoring) -> bool:
    """Return whether torch's fused attention can compute such scores."""
    return scoring.softcap is None and scoring.sinks_H is None and scoring.bias_HL is None


def attend_rows(
    q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, scoring: Scoring, batch: PagedBatch | None = None
) -> Tensor:
    checks.attend_rows(q_THD, k_RGD, v_RGD, scoring, checks.FLOATS_UP_TO_32_BITS)
    if len(q_THD) > _FEW_QUERIES:
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        _attend_many(
            q_THD, len(k_RGD), k_RGD.shape[1], lambda begin, end: (k_RGD[begin:end], v_RGD[begin:end]), scoring, out_THD
        )
        return out_THD
    return paged_attention(q_THD, *in_one_page(len(q_THD), k_RGD, v_RGD), k_RGD.shape[1], scoring)


def _attend_many(q_THD: Tensor, n_rows: int, n_kv_heads: int, read: Rows, scoring: Scoring, out_THD: Tensor) -> None:
    """Attend from the last T of `n_rows` rows, by torch's fused attention if that can compute such scores.

    It also returns the log of each query's sum of weights, by which the results of several blocks of rows are joined.
    """
    if not _can_fuse(scoring):
        out_THD[:] = attend(q_THD, n_rows, n_kv_heads, read, scoring)
        return
    n_heads, head_dim = q_THD.shape[1:]
    n_at_once = max(_LEAST_QUERIES, min(_MOST_QUERIES, _MOST_ELEMENTS // (n_heads * head_dim)))
    for own, first, rows in blocks(len(q_THD), n_rows, scoring.window, n_at_once, _ROWS):
        n_queries = own.stop - own.start
        q_GSTD = q_THD[own].reshape(n_queries, n_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        found_GSTD, log_sum_GST = torch.empty(0), torch.empty(0)
        for begin, end in rows:
            k_GSRD, v_GSRD = (x.transpose(0, 1)[:, None].expand(-1, q_GSTD.shape[1], -1, -1) for x in read(begin, end))
            # Torch's `is_causal` aligns the mask at the top left. That is right only for the queries' own rows.
            mask, is_causal = None, begin == first and (scoring.window is None or n_queries <= scoring.window)
            if not is_causal and not sees_all(n_queries, end - begin, scoring.window, first - begin):
                mask = causal_mask(n_queries, end - begin, scoring.window, q_THD.device, first - begin)
            more_GSTD, log_more_GST = _fused(
                q_GSTD, k_GSRD, v_GSRD, is_causal=is_causal, attn_mask=mask, scale=scoring.scale
            )
            if (log_more_GST == 0.0).any() and k_GSRD[:, 0].isinf().any():
                # If all scores are -inf, torch returns 0, the log of one. Only infinite keys do that.
                out_THD[:] = attend(q_THD, n_rows, n_kv_heads, read, scoring)
                return
            if begin == rows[0][0]:
                found_GSTD, log_sum_GST = more_GSTD, log_more_GST
                continue
            log_both_GST = torch.logaddexp(log_sum_GST, log_more_GST)
            found_GSTD.mul_((log_sum_GST - log_both_GST).exp_()[..., None])
            found_GSTD.add_(more_GSTD.mul_((log_more_GST - log_both_GST).exp_()[..., None]))
            log_sum_GST = log_both_GST
        out_THD[own].view(n_queries, n_kv_heads, -1, head_dim).copy_(found_GSTD.permute(2, 0, 1, 3))
