"""Computes linear attention with one fixed decay for each head: lightning attention (MiniMax-01), retention.

Sources: MiniMax 2025, "MiniMax-01", section 2.2; Sun et al. 2023, "Retentive Network", eq. 6. For each head, S is (V,
N):

    S = w S + v k^T     y = S q

Replaying old rows needs no matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from hybridmem.memory.recurrences.registry import register_family
from hybridmem.memory.specs import RecurrentSpec, matrix_tensor
from hybridmem.memory.state.access import Recurrence, States


def linear_attention_spec(n_heads: int, value_dim: int, key_dim: int, name: str = "recurrence") -> RecurrentSpec:
    """Describe a layer with this recurrence. Row: q, k and v of each head. State: S, (H, V, N) in float32."""
    state = matrix_tensor("kv", n_heads, value_dim, key_dim, n_heads)
    return RecurrentSpec("linear_attention", (n_heads, 2 * key_dim + value_dim), (state,), name)


@dataclass(frozen=True)
class LinearAttention:
    """Advances states by linear attention.

    Attributes:
        log_decay_H: for each head, the logarithm of the factor on its state at each token; float32, at most 0.
        key_dim: the size of queries and keys.
    """

    log_decay_H: Tensor
    key_dim: int

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Advance the states by rows (T, H, 2 N + V); returns outputs (T, H, V) in the rows' dtype, and the states."""
        n_keys = self.key_dim
        q_THN, k_THN, v_THV = rows.split_with_sizes([n_keys, n_keys, rows.shape[2] - 2 * n_keys], -1)
        log_decay_TH = self.log_decay_H.expand(len(rows), -1)
        y_THV = states.kernels.matrix_scan(q_THN, k_THN, v_THV, log_decay_TH, None, states.slots(0))
        return y_THV.to(rows.dtype), states.written()


@register_family("linear_attention")
def example(generator: Generator) -> tuple[RecurrentSpec, Recurrence]:
    return linear_attention_spec(3, 4, 5), LinearAttention(-torch.rand(3, generator=generator), 5)
