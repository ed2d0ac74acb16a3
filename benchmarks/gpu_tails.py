"""Finds the longest tail for which a step on a GPU is faster if it does not write states.

The recurrences are those that run the tokens of a tail again in registers: RWKV-7 and Mamba-1. If bytes alone decided,
a step should not write states while the tails that it reads have no more bytes than the states that it would write
(`memory.build.default_fold`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_states import N_BYTES, make_tails, time_graphs
from benchmarks.harness import Report
from hybridmem.memory.blocks.staging import place
from hybridmem.memory.kernels import Erase, StateSlots, cuda
from hybridmem.memory.recurrences import mamba1_spec, rwkv7_spec
from hybridmem.memory.specs import StateTensor

TAIL_TOKENS = (3, 10, 20, 40)


class Layer(NamedTuple):
    """Holds a recurrent layer: its state, and a function that makes the layer's `scan` for a number of sequences.

    Each sequence has one new token.
    """

    name: str
    state: StateTensor
    make_scan: Callable[[int], Callable[[StateSlots], Tensor]]


def make_rwkv7(n_heads: int, head_dim: int, n_tokens: int) -> Callable[[StateSlots], Tensor]:
    r, k, v, kappa, a = torch.randn(5, n_tokens, n_heads, head_dim, device="cuda").bfloat16()
    kappa, log_w = F.normalize(kappa.float(), dim=-1).bfloat16(), -torch.rand_like(r)
    erase = Erase(kappa, -kappa * a.sigmoid(), after_decay=False)
    return lambda state: cuda.matrix_scan(r, k, v, log_w, erase, state)


def make_mamba1(n_channels: int, n_states: int, n_tokens: int) -> Callable[[StateSlots], Tensor]:
    x, dt = torch.randn(2, n_tokens, n_channels, device="cuda").bfloat16()
    b, c = torch.randn(2, n_tokens, n_states, device="cuda").bfloat16()
    bias, d = torch.randn(2, n_channels, device="cuda")
    rate = -torch.rand(n_states, n_channels, device="cuda")
    return lambda state: cuda.selective_scan(x, dt, bias, b, c, rate, d, state)


LAYERS = (
    Layer("RWKV-7, 40 heads of 64", rwkv7_spec(40, 64).states[-1], partial(make_rwkv7, 40, 64)),
    Layer("Mamba-1, 8192 channels of 16", mamba1_spec(8192, 16, 4).states[-1], partial(make_mamba1, 8192, 16)),
)


def gpu_tails(report: Report, *, quick: bool) -> None:
    """Measure decode steps after tails of several lengths. Needs a CUDA device."""
    for layer in LAYERS:
        for n_sequences in (128,) if quick else (1, 32, 128):
            for row in rows(layer, n_sequences, TAIL_TOKENS, n_rounds=5 if quick else 20):
                report.add("a decode step of one layer whose tail runs again", row)


def rows(
    layer: Layer, n_sequences: int, tail_tokens: tuple[int, ...], *, n_rounds: int
) -> Iterator[dict[str, str | float]]:
    """Yield a row of the table for each length of the tail, with the times of one layer."""
    size, scan = math.prod(layer.state.shape), layer.make_scan(n_sequences)
    n_layers = max(1, N_BYTES // (4 * n_sequences * size))
    flat = torch.randn(n_layers * n_sequences * size, device="cuda")
    cu_rows = place(np.arange(n_sequences + 1), flat.device)
    offsets = torch.arange(0, len(flat), size, device="cuda").view(n_layers, n_sequences)
    nowhere = torch.full_like(offsets[0], -1)
    for n_tail in tail_tokens:
        tails = make_tails(layer.state, torch.bfloat16, n_layers, n_sequences, n_tail, n_new=1)

        def read(tails: list = tails) -> None:  # type: ignore[type-arg]
            for own, tail in zip(offsets, tails, strict=True):
                scan(StateSlots(cu_rows, flat, own, nowhere, layer.state.shape, 0.0, tail))

        def read_and_write() -> None:
            for own in offsets:
                scan(StateSlots(cu_rows, flat, own, own, layer.state.shape, 0.0))

        found = time_graphs({"reads": read, "reads and writes": read_and_write}, n_rounds)
        reading, writing = (found[name].median_ms for name in ("reads", "reads and writes"))
        ring = sum(math.prod(shape) * (2 if of is None else of.itemsize) for shape, of in layer.state.ring or ())
        yield {
            "layer": layer.name, "sequences": n_sequences, "tail, tokens": n_tail,
            "reads, µs": reading / n_layers * 1e3, "reads and writes, µs": writing / n_layers * 1e3,
            "reads and writes / reads": writing / reading, "of bytes": 8 * size / (4 * size + n_tail * ring),
        }  # fmt: skip
