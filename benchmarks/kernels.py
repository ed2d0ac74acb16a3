"""Measures the bytes a second that kernels move, compared with torch's copy in the same run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.ceilings import copy_gbytes_a_second
from benchmarks.harness import Report, interleave
from hybridmem.memory.blocks.staging import place
from hybridmem.memory.kernels import PagedBatch, Scoring, StateSlots, cpu

N_CHANNELS, N_STATES, N_TAPS, N_HEADS, N_KV_HEADS, HEAD_DIM, PAGE_TOKENS = 1536, 16, 4, 12, 4, 64, 16
N_LAYERS = 24
"""Each call works on the next layer, so that the last-level cache does not hold what it needs."""


def kernels(*, quick: bool) -> Report:
    """Measure how many bytes a second each decode kernel moves, beside torch's copy.

    At batch 32, each state is read and written once, each key and value read once.
    """
    report = Report("kernels")
    copy = copy_gbytes_a_second()
    report.notes.append(
        f"copy: torch's, 256 MiB, {copy:.3g} GB/s read + written. State update and attention are asked for 0.6 of it."
    )
    for n_sequences in (32,) if quick else (1, 8, 32):
        for name, (run, n_bytes) in _decode_kernels(n_sequences, 512).items():
            samples = interleave({name: run}, 50 if quick else 200, n_warm_up=3)[name]
            gbytes = n_bytes / samples.median_ms / 1e6
            report.add("kernels", {
                "kernel": name, "sequences": n_sequences, "MB moved": n_bytes / 1e6, "µs": samples.median_ms * 1e3,
                "spread, ms": samples.spread,
                "GB/s": gbytes, "of the copy": gbytes / copy,
            })  # fmt: skip
    return report


def _decode_kernels(n: int, n_context: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Return for each kernel a call for n sequences of one token each, and the bytes that it has to move."""
    x, dt, bias = torch.randn(n, N_CHANNELS), torch.randn(n, N_CHANNELS), torch.randn(N_CHANNELS)
    b = torch.randn(n, N_STATES)
    c = torch.randn(n, N_STATES)
    a = -torch.rand(N_STATES, N_CHANNELS)
    d = torch.randn(N_CHANNELS)
    weight = torch.randn(N_TAPS, N_CHANNELS)
    cu = np.arange(n + 1)
    states, windows, rings = (
        _rotating(n, shape) for shape in ((N_STATES, N_CHANNELS), (N_TAPS - 1, N_CHANNELS), (1, N_CHANNELS))
    )

    row = N_KV_HEADS * HEAD_DIM
    n_pages, page = n * n_context // PAGE_TOKENS, 2 * PAGE_TOKENS * row
    n_pools = min(N_LAYERS, -(-(1 << 28) // (n_pages * page * 4)))
    keys = torch.randn(n_pools * n_pages * page)
    shuffled = torch.randperm(n_pools * n_pages).view(n_pools, n_pages) * page
    q = torch.randn(n, N_HEADS, HEAD_DIM)
    tables = [
        PagedBatch(cu, np.full(n, n_context), pages, np.arange(n + 1) * (n_context // PAGE_TOKENS), PAGE_TOKENS)
        for pages in shuffled
    ]
    turn = iter(range(1 << 60))

    def attention() -> Tensor:
        batch = tables[next(turn) % n_pools]
        return cpu.paged_attention(q, keys, keys[PAGE_TOKENS * row :], batch, N_KV_HEADS, Scoring(HEAD_DIM**-0.5))

    return {
        "state update": (
            lambda: cpu.selective_scan(x, dt, bias, b, c, a, d, states()),
            2 * n * N_STATES * N_CHANNELS * 4,
        ),
        "convolution": (lambda: cpu.causal_conv(x, weight, bias, windows()), 2 * n * (N_TAPS - 1) * N_CHANNELS * 4),
        "tail write": (lambda: cpu.write_rows_((slots := rings()).flat, slots.targets, x), 2 * n * N_CHANNELS * 4),
        f"attention over {n_context}": (attention, n * n_context * 2 * row * 4),
    }


def _rotating(n: int, shape: tuple[int, int]) -> Callable[[], StateSlots]:
    """Return a function that returns the slots of n sequences, whose states a kernel updates in place.

    Each call returns the slots of the next layer, as in a model.
    """
    size = shape[0] * shape[1]
    flat = torch.randn(N_LAYERS * n * size)
    layers = [
        StateSlots(place(np.arange(n + 1), flat.device), flat, offsets, offsets, shape, 0.0)
        for offsets in torch.arange(0, len(flat), size).view(N_LAYERS, n)
    ]
    turn = iter(range(1 << 60))
    return lambda: layers[next(turn) % N_LAYERS]
