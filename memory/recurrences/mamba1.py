"""Computes Mamba-1 as one recurrence over the convolution's input: convolution, small projections, selective scan.

Source: Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", Alg. 2 and section 3.6. The
optional norms of dt, B and C are Jamba's (Lieber et al. 2024, section 3.1).

    x = silu(conv(row))        dt, B, C = split(W_x x)        dt = softplus(W_dt norm(dt) + b_dt)
    h = exp(dt A) h + dt B x   y = C h + D x

The gate is not part of the state, so the model computes it. Replaying old rows repeats the two small matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from hybridmem.memory.kernels import Kernels, Prepared, Weights
from hybridmem.memory.recurrences.convolution import CausalConv, window_tensors
from hybridmem.memory.recurrences.registry import register_family
from hybridmem.memory.specs import RecurrentSpec, StateTensor
from hybridmem.memory.state.access import Recurrence, States


def mamba1_spec(n_channels: int, d_state: int, d_conv: int, name: str = "recurrence") -> RecurrentSpec:
    """Describe a Mamba-1 layer. Row: the E channels before the convolution.
    State: the last d_conv - 1 rows, and h as (N, E) in float32.
    """
    ring = (((n_channels,), None), ((n_channels,), None), ((d_state,), None))  # These are the shapes of x, dt and B.
    h = StateTensor("ssm", (d_state, n_channels), ring=ring)
    return RecurrentSpec("mamba1", (n_channels,), (*window_tensors(n_channels, d_conv), h), name)


@dataclass(frozen=True)
class Mamba1:
    """Advances states by the Mamba-1 recurrence with a layer's weights.

    Attributes:
        x_proj, dt_proj: the small projections, (T, E) -> (T, dt_rank + 2 N) and (T, dt_rank) -> (T, E).
        dt_bias_E: bias of dt, (E,).
        a_NE: -exp(A_log) transposed, float32.
        d_E: float32.
        norms: a function that splits dt, B and C and normalizes each; or None.
        at_once: a function of (recurrence, states, rows) that computes outputs and end states in one call, with the
            same bits as the separate functions. It returns None for cases that it does not support. It is faster for
            few rows, where calls take longer than what they compute.
    """

    conv: CausalConv
    x_proj: Callable[[Tensor], Tensor]
    dt_proj: Callable[[Tensor], Tensor]
    dt_bias_E: Tensor
    a_NE: Tensor
    d_E: Tensor
    norms: Callable[[Tensor], Sequence[Tensor]] | None = None
    at_once: Callable[[Mamba1, States, Tensor], Tensor | None] | None = None

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Advance the states by rows (T, E); returns outputs (T, E) in the rows' dtype, and the states."""
        if self.at_once is not None and (y_TE := self.at_once(self, states, rows)) is not None:
            return y_TE, states.written()
        kernels = states.kernels
        dt_bias, a, d = self.prepared(kernels)
        x_TE = self.conv(states, rows)
        dt_TE, b_TN, c_TN = self.project(x_TE)
        y_TE = kernels.selective_scan(x_TE, dt_TE, dt_bias, b_TN, c_TN, a, d, states.slots(-1))
        return y_TE.to(rows.dtype), states.written()

    def prepared(self, kernels: Kernels) -> list[Prepared]:
        """Return dt's bias, a and d in the form that these kernels take."""
        return self._weights.prepared(kernels)

    @cached_property
    def _weights(self) -> Weights:
        return Weights(self.dt_bias_E, self.a_NE, self.d_E)

    def project(self, x_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dt before its bias and softplus (T, E), and B and C (T, N) each."""
        dt_b_c, n_states = self.x_proj(x_TE), self.a_NE.shape[0]
        if self.norms is None:
            dt_TR, b_TN, c_TN = dt_b_c.split_with_sizes([dt_b_c.shape[1] - 2 * n_states, n_states, n_states], -1)
        else:
            dt_TR, b_TN, c_TN = self.norms(dt_b_c)
        return self.dt_proj(dt_TR), b_TN, c_TN


@register_family("mamba1", is_exact=False)
def example(generator: Generator) -> tuple[RecurrentSpec, Recurrence]:
    def weights(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    def uniform(least: float, most: float, *sizes: int) -> Tensor:
        return least + (most - least) * torch.rand(*sizes, generator=generator)

    # Initial values are those of published models: A = -1, -2 ..., and a bias that alone gives a dt between 0.001 and
    # 0.1. If dt came from random weights, states would grow to hundreds, and so would the errors of rounding.
    dt_E = torch.exp(uniform(math.log(0.001), math.log(0.1), 6))
    x_proj, dt_proj = weights(2 + 2 * 3, 6), uniform(-1, 1, 6, 2) / 2**0.5
    conv = CausalConv(uniform(-1, 1, 4, 6), uniform(-1, 1, 6))
    decays = -torch.arange(1.0, 4.0)[:, None].expand(3, 6).contiguous()
    before_softplus = dt_E + torch.log(-torch.expm1(-dt_E))
    layer = Mamba1(conv, _Product(x_proj), _Product(dt_proj), before_softplus, decays, torch.ones(6))
    return mamba1_spec(6, 3, 4), layer


@dataclass(frozen=True)
class _Product:
    """Multiplies rows by a matrix. The matrix is a field, so that the example can be moved to a device."""

    weight: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight)
