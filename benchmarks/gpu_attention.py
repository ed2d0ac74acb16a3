"""Attention over pages on a GPU: decode steps at a long context and drafts that are verified, beside what a copy moves.

Keys and values of many layers are met in turn, so that none is in a cache when its turn comes; all layers are one CUDA graph, so that
the host does not count.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from benchmarks.gpu_states import copy_gbytes_a_second, time_graph
from benchmarks.harness import Report, Row
from memory.kernels import PagedBatch, Scoring, cuda

N_BYTES = 2 << 30
"""Keys and values met in turn, at least: far more than the last-level cache of a GPU holds (60 MB on an H200)."""
CONTEXT, PAGE_TOKENS, N_DRAFTS = 8192, 16, 4


class Heads(NamedTuple):
    """An attention's sizes. Where `is_latent`, the keys are the values too."""

    name: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    is_latent: bool = False

    @property
    def row_bytes(self) -> int:
        """Of a token's keys and values in bfloat16."""
        return 2 * self.n_kv_heads * self.head_dim * (1 if self.is_latent else 2)


HEADS = (
    Heads("32 heads, 8 of keys, 128", 32, 8, 128),
    Heads("16 heads, 2 of keys, 256", 16, 2, 256),
    Heads("latent, 128 heads, 1 of keys, 576", 128, 1, 576, is_latent=True),
)


def gpu_attention(report: Report, *, quick: bool) -> None:
    """Needs a CUDA device."""
    copy = copy_gbytes_a_second()
    for heads in HEADS[:1] if quick else HEADS:
        for n_sequences in (1, 128) if quick else (1, 32, 128, 256):
            n_rounds = 5 if quick else 20
            decode, verify = (_milliseconds(heads, n_sequences, n_new, n_rounds) for n_new in (1, 1 + N_DRAFTS))
            report.add(f"attention over {CONTEXT} tokens, one layer, bfloat16", row(heads, n_sequences, decode, verify, copy))


def row(heads: Heads, n_sequences: int, decode_ms: float, verify_ms: float, copy: float) -> Row:
    """Of the table.

    Args:
        decode_ms, verify_ms: one layer of a step, of one token a sequence and of one more than the drafts.
        copy: GB/s, read and written.
    """
    gbytes = n_sequences * CONTEXT * heads.row_bytes / decode_ms / 1e6
    return {
        "attention": heads.name, "sequences": n_sequences, "decode, µs": decode_ms * 1e3, "GB/s": gbytes, "of the copy": gbytes / copy,
        f"{N_DRAFTS} drafts, µs": verify_ms * 1e3, f"{N_DRAFTS} drafts / step": verify_ms / decode_ms,
    }  # fmt: skip


def _milliseconds(heads: Heads, n_sequences: int, n_new: int, n_rounds: int) -> float:
    """Of one layer."""
    page = PAGE_TOKENS * heads.row_bytes // 2
    n_pages = n_sequences * (CONTEXT // PAGE_TOKENS)
    n_layers = max(1, -(-N_BYTES // (2 * n_pages * page)))
    flat = torch.empty(n_layers * n_pages * page, dtype=torch.bfloat16, device="cuda").normal_()
    values = flat if heads.is_latent else flat[PAGE_TOKENS * heads.n_kv_heads * heads.head_dim :]
    offsets = torch.randperm(n_layers * n_pages, device="cuda").view(n_layers, n_pages) * page
    cu_seqlens, lengths = np.arange(n_sequences + 1) * n_new, np.full(n_sequences, CONTEXT)
    cu_pages = np.arange(n_sequences + 1) * (CONTEXT // PAGE_TOKENS)
    batches = [PagedBatch(cu_seqlens, lengths, pages, cu_pages, PAGE_TOKENS) for pages in offsets]
    q = torch.randn(n_sequences * n_new, heads.n_heads, heads.head_dim, device="cuda").bfloat16()
    scoring = Scoring(heads.head_dim**-0.5)

    def run() -> None:
        for batch in batches:
            cuda.paged_attention(q, flat, values, batch, heads.n_kv_heads, scoring)

    return time_graph(run, n_rounds).median_ms / n_layers
