"""RWKV-7's state evolution: a decay for each channel, and a rank-one change that need not be what the key wrote.

Peng et al. 2025, "RWKV-7 Goose", eq. 16-17. For each head, with S as (V, N):

    S = S diag(w) - (S kappa) (a * kappa)^T + v k^T     y = S r

Everything that makes the rows (token shift, low-rank projections) comes before, everything after y (group norm, bonus,
gate) holds no state. A replay holds no matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, Tensor

from memory.kernels import Erase
from memory.recurrences.registry import register_family
from memory.specs import RecurrentSpec, matrix_tensor
from memory.state.access import Recurrence, States


def rwkv7_spec(n_heads: int, head_dim: int, name: str = "recurrence") -> RecurrentSpec:
    """Row, for each head: r, log w, k, v, kappa and a, of `head_dim` each. State: S, (H, V, N) in float32."""
    state = matrix_tensor("wkv", n_heads, head_dim, head_dim, n_heads, decays_keys=True, has_b=True)
    return RecurrentSpec("rwkv7", (6, n_heads, head_dim), (state,), name)


@dataclass(frozen=True)
class RWKV7:
    """The fold; it has no weights of its own."""

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Rows (T, 6, H, N) -> outputs (T, H, N) in the rows' dtype. kappa has length 1; log w is at most 0."""
        r, log_w, k, v, kappa, a = rows.float().unbind(1)
        y_THV = states.kernels.matrix_scan(r, k, v, log_w, Erase(kappa, -kappa * a, after_decay=False), states.slots(0))
        return y_THV.to(rows.dtype), states.written()


@dataclass(frozen=True)
class _Example:
    """Any row made a valid one."""

    fold: RWKV7

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        rows = rows.clone()
        rows[:, 1] = -rows[:, 1].abs()
        rows[:, 4] /= rows[:, 4].norm(dim=-1, keepdim=True) + 1
        return self.fold(states, rows)


@register_family("rwkv7")
def example(generator: Generator) -> tuple[RecurrentSpec, Recurrence]:
    return rwkv7_spec(3, 4), _Example(RWKV7())
