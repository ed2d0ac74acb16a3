"""Computes attention of trees of draft tokens over pages on a GPU: a query is a request whose pages have one row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import starts_of
from hybridmem.memory.kernels.cuda.attention import paged_attention
from hybridmem.memory.kernels.signature import PagedBatch, Scoring, TreePaths, as_tensor

_MOST_ROWS = 1 << 18
"""How many rows the queries of one call read together. Their places take 8 bytes for each head of keys."""


def tree_attention(
    q_QHD: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, paths: TreePaths, n_kv_heads: int, scoring: Scoring
) -> Tensor:  # fmt: skip
    key = ("rows of trees", n_kv_heads, q_QHD.shape[2])
    if key not in batch.layouts:
        batch.layouts[key] = _cut(batch, paths)
    out_QHD = torch.empty_like(q_QHD, memory_format=torch.contiguous_format)
    for own, request, n_before, path_rows, cu_rows in batch.layouts[key]:
        places = _places(batch, request, n_before, path_rows, cu_rows, n_kv_heads, q_QHD.shape[2])
        lengths = n_before + np.diff(cu_rows)
        each = PagedBatch(np.arange(len(lengths) + 1), lengths, places, starts_of(lengths), page_tokens=1)
        out_QHD[own] = paged_attention(q_QHD[own], keys, values, each, n_kv_heads, scoring.of(own))
    return out_QHD


def _cut(batch: PagedBatch, paths: TreePaths) -> list[tuple[slice, int, int, Tensor, np.ndarray]]:
    """Divide the queries into those of one call each: queries, request, rows before the tree, and rows on paths."""
    found = []
    for i, n_before in enumerate(paths.starts.tolist()):
        first, last = batch.cu_seqlens[i : i + 2].tolist()
        n_at_once = max(1, _MOST_ROWS // int(batch.kv_lengths[i]))
        for begin in range(first, last, n_at_once):
            cu_rows = paths.cu_rows[begin : min(begin + n_at_once, last) + 1]
            rows = torch.from_numpy(paths.rows[cu_rows[0] : cu_rows[-1]]).to(as_tensor(batch.pages).device)
            found.append((slice(begin, begin + len(cu_rows) - 1), i, n_before, rows, cu_rows - cu_rows[0]))
    return found


def _places(
    batch: PagedBatch, request: int, n_before: int, path_rows: Tensor, cu_rows: np.ndarray, n_kv_heads: int,
    head_dim: int,
) -> Tensor:  # fmt: skip
    """Return the element offset of each row that each query sees, (rows,), or (G, rows) with several heads of keys."""
    pages, page_tokens = (
        as_tensor(batch.pages)[batch.cu_pages[request] : batch.cu_pages[request + 1]],
        batch.page_tokens,
    )
    before = torch.arange(n_before, device=pages.device)
    rows = torch.cat([
        part for own in path_rows.split(np.diff(cu_rows).tolist()) for part in (before, n_before + own)
    ])  # fmt: skip
    places = pages[rows // page_tokens] + rows % page_tokens * head_dim
    # A kernel adds the place of a head in a page, which here is one row.
    apart = torch.arange(n_kv_heads, device=pages.device) * ((page_tokens - 1) * head_dim)
    return places if n_kv_heads == 1 else places + apart[:, None]
