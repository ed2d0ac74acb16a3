"""Measures decoding from body and tail without writing the state, against writing it at each step.

A matrix-valued state after L tokens is S_L = S_0 diag(w_1 ... w_L) + sum of u_j (w_{j+1} ... w_L) k_j^T, where u_j is
what token j wrote: dt x for SSD, beta (v - S k) for the delta rule. So y = S_L q needs S_0 once, to be read only, and
the L rows (u_j, k_j) since (ReplaySSM, Dao AI Lab 2026). This benchmark stores these rows after convolution and
scaling, which favors deferred writing: a real tail holds raw inputs, which would have to be convolved again at each
step, or kept convolved in a second ring buffer.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from benchmarks.harness import Report, interleave
from hybridmem.memory.blocks.staging import place
from hybridmem.memory.kernels import Erase, StateSlots, cpu
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, REDUCING, subroutine

SHAPES = {
    "SSD, 24 heads of 64 x 128": (24, 1, 64, 128, False),
    "delta rule, 12 heads of 128 x 128": (12, 6, 128, 128, True),
}
N_BYTES = 300 << 20
"""States in turn, so that none is in a cache when its turn comes."""


def deferred(report: Report, *, quick: bool) -> None:
    """Measure one decode step of one layer, with the state written at each step and deferred.

    The rows since the last write are half a window, one window, and two.
    """
    for name, shape in SHAPES.items():
        for n_sequences in (8,) if quick else (1, 8, 32):
            for n_rows in (16, 32, 64):
                work = Work(n_sequences, n_rows, *shape)
                times = interleave({"eager": work.eager, "deferred": work.deferred}, 10 if quick else 60, n_warm_up=3)
                eager, late = times["eager"].median_ms, times["deferred"].median_ms
                report.add("a decode step of one layer, ms: eager writes and deferred ones", {
                    "layer": name, "sequences": n_sequences, "rows since the last write": n_rows, "eager": eager,
                    "deferred": late, "deferred / eager": late / eager,
                })  # fmt: skip


class Work:
    """Runs a decode step through the states of many layers, with deferred writes and without, from the same numbers."""

    def __init__(
        self, n_sequences: int, n_rows: int, n_heads: int, n_groups: int, value_dim: int, key_dim: int, erases: bool
    ) -> None:
        n, size = n_sequences, n_heads * value_dim * key_dim
        self.shape, self.n_layers = (n_heads, value_dim, key_dim), max(1, N_BYTES // (4 * n * size))
        self.flat = torch.randn(self.n_layers * n * size)
        self.offsets = torch.arange(0, len(self.flat), size).view(self.n_layers, n)
        self.q = torch.randn(n, n_groups, key_dim)
        self.k = torch.nn.functional.normalize(torch.randn(n, n_groups, key_dim), dim=-1)
        self.v = torch.randn(n, n_heads, value_dim)
        self.beta = torch.rand(n, n_heads)
        self.log_decay = -torch.rand(n, n_heads) / 10
        self.old_k = torch.nn.functional.normalize(torch.randn(n, n_rows, n_groups, key_dim), dim=-1)
        self.old_u = torch.randn(n, n_rows, n_heads, value_dim)
        self.old_log_decay = -torch.rand(n, n_rows, n_heads) / 10
        self.erases, self._turn = erases, 0

    def eager(self) -> Tensor:
        offsets = self.offsets[self._turn % self.n_layers]
        self._turn += 1
        erase = None
        if self.erases:
            erase = Erase(
                self.k,
                self.k.repeat_interleave(self.shape[0] // self.k.shape[1], 1) * -self.beta[:, :, None],
                after_decay=True,
            )
        slots = StateSlots(
            place(np.arange(len(offsets) + 1), self.flat.device), self.flat, offsets, offsets, self.shape, 0.0
        )
        return cpu.matrix_scan(self.q, self.k, self.v * self.beta[:, :, None], self.log_decay, erase, slots)

    def deferred(self) -> Tensor:
        offsets = self.offsets[self._turn % self.n_layers]
        self._turn += 1
        y = torch.empty_like(self.v)
        # The share that is left of token j's write after the decays of all later tokens, the current one included, and
        # the share that is left of the initial state.
        left = (self.old_log_decay.flip(1).cumsum(1).flip(1) - self.old_log_decay + self.log_decay[:, None]).exp()
        body = (self.old_log_decay.sum(1) + self.log_decay).exp()
        heads = self.shape[0] // self.k.shape[1]
        qk = torch.einsum("sjgn,sgn->sjg", self.old_k, self.q).repeat_interleave(heads, 2) * left
        kk = torch.einsum("sjgn,sgn->sjg", self.old_k, self.k).repeat_interleave(heads, 2) * left
        new = (self.q * self.k).sum(-1).repeat_interleave(heads, 1)
        _read(
            self.flat.numpy(), offsets.numpy(), self.q.numpy(), self.k.numpy(), self.v.numpy(), self.beta.numpy(),
            body.numpy(), self.old_u.numpy(), qk.numpy(), kk.numpy(), new.numpy(), self.erases, y.numpy(),
        )  # fmt: skip
        return y


@compiled(ELEMENTWISE, parallel=True)
def _read(flat, offsets, q, k, v, beta, body, old_u, qk, kk, new, erases, y):
    n_heads, value_dim = y.shape[1:]
    n_rows, key_dim, n_shared = old_u.shape[1], q.shape[2], n_heads // q.shape[1]
    for task in prange(len(offsets) * n_heads):
        i, h = task // n_heads, task % n_heads
        query, key, out = q[i, h // n_shared], k[i, h // n_shared], y[i, h]
        found = np.zeros(value_dim, np.float32)
        for r in range(value_dim):
            start = offsets[i] + (h * value_dim + r) * key_dim
            s = flat[start : start + key_dim]
            out[r] = body[i, h] * _dot(s, query)
            if erases:
                found[r] = body[i, h] * _dot(s, key)
        for j in range(n_rows):
            u = old_u[i, j, h]
            _add(out, u, qk[i, j, h])
            if erases:
                _add(found, u, kk[i, j, h])
        for r in range(value_dim):
            out[r] += new[i, h] * beta[i, h] * (v[i, h, r] - found[r])


@subroutine(REDUCING)
def _dot(a, b):
    total = np.float32(0.0)
    for e in range(len(a)):
        total += a[e] * b[e]
    return total


@subroutine(ELEMENTWISE)
def _add(out, x, weight):
    for e in range(len(out)):
        out[e] += weight * x[e]
