"""Computes RWKV-7's state evolution: a decay for each channel, and separate keys for erasing and for writing.

Source: Peng et al. 2025, "RWKV-7 Goose", eq. 16-17. For each head, with S as (V, N):

    S = S diag(w) - (S kappa) (a * kappa)^T + v k^T     y = S r

The model computes the token shift and low-rank projections that make the rows, and the group norm, bonus and gate after
y. None of these has a state here. Replaying old rows needs no matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, Tensor

from hybridmem.memory.kernels import Erase
from hybridmem.memory.recurrences.registry import register_family
from hybridmem.memory.specs import RecurrentSpec, matrix_tensor
from hybridmem.memory.state.access import Recurrence, States


def rwkv7_spec(n_heads: int, head_dim: int, name: str = "recurrence") -> RecurrentSpec:
    """Describe an RWKV-7 layer. Row, for each head: r, log w, k, v, kappa and a, of `head_dim` each.
    State: S, (H, V, N) in float32.
    """
    state = matrix_tensor("wkv", n_heads, head_dim, head_dim, n_heads, decays_keys=True, has_b=True)
    return RecurrentSpec("rwkv7", (6, n_heads, head_dim), (state,), name)


@dataclass(frozen=True)
class RWKV7:
    """Advances states by the RWKV-7 recurrence, which has no weights of its own."""

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Advance the states by rows (T, 6, H, N); returns outputs (T, H, N) in the rows' dtype, and the states.
        kappa has length 1; log w is at most 0.
        """
        r, log_w, k, v, kappa, a = rows.float().unbind(1)
        y_THV = states.kernels.matrix_scan(r, k, v, log_w, Erase(kappa, -kappa * a, after_decay=False), states.slots(0))
        return y_THV.to(rows.dtype), states.written()


@dataclass(frozen=True)
class _Example:
    """Runs RWKV-7 on rows of any numbers, which it first turns into valid rows."""

    fold: RWKV7

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        rows = rows.clone()
        rows[:, 1] = -rows[:, 1].abs()
        rows[:, 4] /= rows[:, 4].norm(dim=-1, keepdim=True) + 1
        return self.fold(states, rows)


@register_family("rwkv7")
def example(generator: Generator) -> tuple[RecurrentSpec, Recurrence]:
    return rwkv7_spec(3, 4), _Example(RWKV7())
