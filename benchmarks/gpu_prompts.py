"""Measures attention over a prompt on a GPU: ours over pages, beside what torch ships for contiguous keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.gpu_attention import HEADS, PAGE_TOKENS, Heads
from benchmarks.gpu_states import time_graphs
from benchmarks.harness import Report
from hybridmem.memory.kernels import PagedBatch, Scoring, cuda

_MOST_APART = 2e-2
"""Share of the largest value by which outputs in bfloat16 may differ from ours; more is an error."""


def gpu_prompts(report: Report, *, quick: bool) -> None:
    """Measure one layer of attention over a prompt, as a CUDA graph, ours and peers in turns. Needs a CUDA device.

    Latent attention is left out: torch's flash attention does not support heads of 576 elements.
    """
    for heads in HEADS[: 1 if quick else 2]:
        for n_tokens in (2048,) if quick else (2048, 8192):
            runs, expected = dict[str, Callable[[], Tensor]](), None
            for name, run in contestants(heads, n_tokens):
                try:
                    out = run()
                except Exception as error:  # A peer may lack a compiler, or may not support heads of this size.
                    if name == "ours":
                        raise
                    report.notes.append(
                        f"{name} is not measured with {heads.name}: {type(error).__name__}: {str(error)[:200]}"
                    )
                    continue
                expected = out if expected is None else expected
                if float((out - expected).abs().max()) > _MOST_APART * float(expected.abs().max()):
                    raise ValueError(
                        f"{name} and ours differ over {n_tokens} tokens of {heads.name}: no speed is measured"
                    )
                runs[name] = run
            times = {name: samples.median_ms for name, samples in time_graphs(runs, 5 if quick else 20).items()}
            # There are two products, and half of each is masked.
            tflops = 2 * heads.n_heads * heads.head_dim * n_tokens**2 / 1e9
            for name, ms in times.items():
                report.add("attention over a prompt, one layer, bfloat16", {
                    "attention": heads.name, "tokens": n_tokens, "what": name, "ms": ms, "TFLOP/s": tflops / ms,
                    "ours / this": times["ours"] / ms,
                })  # fmt: skip


def contestants(heads: Heads, n_tokens: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the names and functions to compare, ours first. Each function computes the same output (H, T, D)."""
    q, k, v = (
        torch.randn(1, n, n_tokens, heads.head_dim, device="cuda").bfloat16()
        for n in (heads.n_heads, *[heads.n_kv_heads] * 2)
    )
    scale = heads.head_dim**-0.5
    yield "ours", partial(_attend_pages, q, *in_pages(k, v), heads, Scoring(scale))
    yield "torch, flash", partial(_attend_flash, q, k, v, scale)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n_tokens, n_tokens, device=q.device)
    flex = torch.compile(flex_attention)
    yield "torch, FlexAttention", lambda: flex(q, k, v, scale=scale, block_mask=mask, enable_gqa=True)[0]


def in_pages(k_1GTD: Tensor, v_1GTD: Tensor) -> tuple[Tensor, Tensor, PagedBatch]:
    """Return keys and values in pages of shuffled order, and the batch that says where the pages are."""
    _, n_kv_heads, n_tokens, head_dim = k_1GTD.shape
    n_pages, half = n_tokens // PAGE_TOKENS, PAGE_TOKENS * n_kv_heads * head_dim
    pages = [x[0].view(n_kv_heads, n_pages, PAGE_TOKENS, head_dim).transpose(0, 1).flatten(1) for x in (k_1GTD, v_1GTD)]
    order = torch.randperm(n_pages, device=k_1GTD.device)
    flat = torch.empty(n_pages, 2 * half, dtype=k_1GTD.dtype, device=k_1GTD.device)
    flat[order] = torch.cat(pages, 1)
    batch = PagedBatch(
        np.array([0, n_tokens]), np.array([n_tokens]), order * (2 * half), np.array([0, n_pages]), PAGE_TOKENS
    )
    return flat.view(-1), flat.view(-1)[half:], batch


def _attend_pages(
    q_1HTD: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, heads: Heads, scoring: Scoring
) -> Tensor:
    return cuda.paged_attention(q_1HTD[0].transpose(0, 1), keys, values, batch, heads.n_kv_heads, scoring).transpose(
        0, 1
    )


def _attend_flash(q_1HTD: Tensor, k_1GTD: Tensor, v_1GTD: Tensor, scale: float) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q_1HTD, k_1GTD, v_1GTD, is_causal=True, scale=scale, enable_gqa=True)[0]
