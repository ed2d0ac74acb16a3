"""Measures attention over pages on a GPU: decode steps at a long context, and drafts that are verified.

Each is compared with torch's copy. Every layer has keys and values of its own and the layers run one after the other,
so that no layer finds its bytes in a cache. All layers are one CUDA graph, so that the host's time does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_states import copy_gbytes_a_second, time_graph
from benchmarks.harness import Report, Row
from hybridmem.memory.kernels import FoldedRows, PagedBatch, Scoring, cuda
from hybridmem.memory.quantization import Storage

N_BYTES = 2 << 30
"""Bytes of all keys and values, at least: far more than the last-level cache of a GPU holds (60 MB on an H200)."""
CONTEXT, PAGE_TOKENS, N_DRAFTS = 8192, 16, 4


class Heads(NamedTuple):
    """Holds the sizes of an attention layer. With `is_latent`, the keys serve as values too."""

    name: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    is_latent: bool = False

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token's keys and values in bfloat16."""
        return 2 * self.n_kv_heads * self.head_dim * (1 if self.is_latent else 2)


HEADS = (
    Heads("32 heads, 8 of keys, 128", 32, 8, 128),
    Heads("16 heads, 2 of keys, 256", 16, 2, 256),
    Heads("latent, 128 heads, 1 of keys, 576", 128, 1, 576, is_latent=True),
)


def gpu_attention(report: Report, *, quick: bool) -> None:
    """Measure attention in decode steps and in the verification of drafts. Needs a CUDA device."""
    copy = copy_gbytes_a_second()
    for heads in HEADS[:1] if quick else HEADS:
        for n_sequences in (1, 128) if quick else (1, 32, 128, 256):
            n_rounds = 5 if quick else 20
            decode, verify = (_milliseconds(heads, n_sequences, n_new, n_rounds) for n_new in (1, 1 + N_DRAFTS))
            report.add(
                f"attention over {CONTEXT} tokens, one layer, bfloat16", row(heads, n_sequences, decode, verify, copy)
            )


def row(heads: Heads, n_sequences: int, decode_ms: float, verify_ms: float, copy: float) -> Row:
    """Return a row of the table.

    Args:
        decode_ms, verify_ms: time of one layer in a step of one token for each sequence, and in a step that verifies
            drafts (one token more than there are drafts).
        copy: bandwidth of torch's copy in GB/s, bytes read and written together.
    """
    gbytes = n_sequences * CONTEXT * heads.row_bytes / decode_ms / 1e6
    return {
        "attention": heads.name, "sequences": n_sequences, "decode, µs": decode_ms * 1e3, "GB/s": gbytes,
        "of the copy": gbytes / copy, f"{N_DRAFTS} drafts, µs": verify_ms * 1e3,
        f"{N_DRAFTS} drafts / step": verify_ms / decode_ms,
    }  # fmt: skip


def _milliseconds(heads: Heads, n_sequences: int, n_new: int, n_rounds: int) -> float:
    """Return the median milliseconds of one layer."""
    run, n_layers = make_layers(heads, n_sequences, n_new)
    return time_graph(run, n_rounds).median_ms / n_layers


def make_layers(
    heads: Heads,
    n_sequences: int,
    n_new: int,
    *,
    context: int = CONTEXT,
    n_bytes: int = N_BYTES,
    storage: Storage | None = None,
) -> tuple[Callable[[], Tensor], int]:
    """Return a function that runs a step through many layers, and the number of layers.

    The function returns the output of the last layer.

    Args:
        context: rows of each sequence, the `n_new` of the step included.
        n_bytes: about how many bytes the keys and values of all layers take in bfloat16.
        storage: the format of all rows before those of the last page; None keeps all rows in pages.
    """
    n_own = context if storage is None else max(n_new, PAGE_TOKENS)
    page, n_each = PAGE_TOKENS * heads.row_bytes // 2, -(-n_own // PAGE_TOKENS)
    n_layers = max(1, -(-n_bytes // (n_sequences * context * heads.row_bytes)))
    flat = torch.empty(n_layers * n_sequences * n_each * page, dtype=torch.bfloat16, device="cuda").normal_()
    values = flat if heads.is_latent else flat[PAGE_TOKENS * heads.n_kv_heads * heads.head_dim :]
    offsets = torch.randperm(n_layers * n_sequences * n_each, device="cuda").view(n_layers, -1) * page
    cu_seqlens, lengths = np.arange(n_sequences + 1) * n_new, np.full(n_sequences, n_own)
    cu_pages = np.arange(n_sequences + 1) * n_each
    batches = [PagedBatch(cu_seqlens, lengths, pages, cu_pages, PAGE_TOKENS) for pages in offsets]
    folded = [None] * n_layers if storage is None else _folded(heads, storage, n_layers, n_sequences, context - n_own)
    q = torch.randn(n_sequences * n_new, heads.n_heads, heads.head_dim, device="cuda").bfloat16()
    scoring = Scoring(heads.head_dim**-0.5)

    def run() -> Tensor:
        for batch, old in zip(batches, folded, strict=True):
            out = cuda.paged_attention(q, flat, values, batch, heads.n_kv_heads, scoring, old)
        return out

    return run, n_layers


def _folded(heads: Heads, storage: Storage, n_layers: int, n_sequences: int, n_rows: int) -> list[FoldedRows]:
    """Return quantised rows for each layer. Codes and scales are the bytes of small random numbers."""
    shapes = [
        shape
        for by_channel in (True, False)
        for shape in storage.shapes(heads.n_kv_heads, storage.group, heads.head_dim, by_channel=by_channel)
    ]
    places = np.cumsum([0, *(-(-math.prod(shape) * dtype.itemsize // 64) * 64 for shape, dtype in shapes)])
    n_each, n_block_bytes = -(-n_rows // storage.group), int(places[-1])
    arena = (
        (torch.rand(n_layers * n_sequences * n_each * n_block_bytes // 2, device="cuda") * 0.01)
        .half()
        .view(torch.uint8)
    )
    flats = tuple(arena[place:].view(dtype) for (_, dtype), place in zip(shapes, places[:-1].tolist(), strict=True))
    blocks = np.random.default_rng(0).permutation(n_layers * n_sequences * n_each).reshape(n_layers, -1) * n_block_bytes
    cu_blocks, lengths = np.arange(n_sequences + 1) * n_each, np.full(n_sequences, n_rows)
    return [
        FoldedRows(storage, tuple(s for s, _ in shapes), flats, own, cu_blocks, lengths, heads.head_dim)
        for own in torch.as_tensor(blocks, device=arena.device)
    ]
