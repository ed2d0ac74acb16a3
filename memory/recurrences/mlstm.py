"""Computes xLSTM's matrix memory (mLSTM): exponential gates, a normaliser, and a stabiliser that keeps both in range.

Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory", eq. 19 to 27. For each head, with C as (V, N), i and f the
gates before their activations, and a scale of 1 / sqrt(N):

    m' = max(log sigmoid(f) + m, i)     w = exp(log sigmoid(f) + m - m')     u = exp(i - m')
    C = w C + u v k^T                   n = w n + u k                        y = C q / (max(|n q|, exp(-m')) + eps)

C and n are one matrix of V + 1 rows, for n is what C is for a value of 1. A replay holds no matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor

from hybridmem.memory.kernels import Weights
from hybridmem.memory.recurrences.registry import register_family
from hybridmem.memory.specs import RecurrentSpec, StateTensor, matrix_tensor
from hybridmem.memory.state.access import Recurrence, States


def mlstm_spec(n_heads: int, value_dim: int, key_dim: int, name: str = "recurrence") -> RecurrentSpec:
    """Describe an mLSTM layer. Row: q, k and v of all heads, then i and f of each.
    State: C and n, (H, V + 1, N), and m, (H,), float32.
    """
    cell = matrix_tensor("cell", n_heads, value_dim + 1, key_dim, n_heads)
    stabiliser = StateTensor("stabiliser", (n_heads,), keeps_dtype=True, ring=(((n_heads,), torch.float32),))
    return RecurrentSpec("mlstm", (n_heads * (2 * key_dim + value_dim + 2),), (cell, stabiliser), name)


@dataclass(frozen=True)
class MLSTM:
    """Advances states by the mLSTM recurrence.

    Attributes:
        value_dim, key_dim: sizes of values and of keys.
        eps: is added to the normaliser.
        zeros_H: (H,) float32, what is added to f.
    """

    value_dim: int
    key_dim: int
    eps: float
    zeros_H: Tensor

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Advance the states by rows (T, row); returns outputs (T, H V) in the rows' dtype, and the states."""
        n_heads, kernels = len(self.zeros_H), states.kernels
        n_keys, n_values = n_heads * self.key_dim, n_heads * self.value_dim
        *qkv, gate_TH, forget_TH = rows.split_with_sizes([n_keys, n_keys, n_values, n_heads, n_heads], -1)
        q_THN, k_THN, v_THV = (x.reshape(len(rows), n_heads, -1) for x in qkv)
        log_decay_TH = -kernels.softplus(-forget_TH, *self._weights.prepared(kernels))
        fade_TH, strength_TH, floor_TH = kernels.stabilise(gate_TH, log_decay_TH, states.slots(1)).unbind()
        ones_TH1 = v_THV.new_ones(*v_THV.shape[:2], 1)
        y_THV = kernels.matrix_scan(
            q_THN, k_THN, torch.cat([v_THV, ones_TH1], -1), fade_TH, None, states.slots(0), strength_TH=strength_TH
        )
        y_THV, norm_TH1 = (y_THV * self.key_dim**-0.5).split_with_sizes([self.value_dim, 1], -1)
        y_THV = y_THV / (torch.maximum(norm_TH1.abs(), floor_TH[:, :, None]) + self.eps)
        return y_THV.flatten(1).to(rows.dtype), states.written()

    @cached_property
    def _weights(self) -> Weights:
        return Weights(self.zeros_H)


@register_family("mlstm")
def example(generator: Generator) -> tuple[RecurrentSpec, Recurrence]:
    return mlstm_spec(3, 4, 5), MLSTM(4, 5, 1e-6, torch.zeros(3))
