"""Mamba-1: short convolution, small projections and selective scan, as one fold over the convolution's input.

Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", Alg. 2 and section 3.6; the optional norms
of dt, B and C are Jamba's (Lieber et al. 2024, section 3.1).

    x = silu(conv(row))        dt, B, C = split(W_x x)        dt = softplus(W_dt norm(dt) + b_dt)
    h = exp(dt A) h + dt B x   y = C h + D x

The gate is not part of the state, so it stays with the model. A replay repeats the two small matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memory.interface import RecurrentSpec, StateTensor
from memory.kernels import Kernels, Prepared
from memory.recurrent_state import States


def mamba1_spec(n_channels: int, d_state: int, d_conv: int, name: str = "recurrence") -> RecurrentSpec:
    """Row: the E channels before the convolution. State: the last d_conv - 1 rows, and h as (N, E) in float32."""
    window = (StateTensor("conv", (d_conv - 1, n_channels), dtype=None),) if d_conv > 1 else ()
    return RecurrentSpec("mamba1", (n_channels,), (*window, StateTensor("ssm", (d_state, n_channels))), name)


@dataclass(frozen=True)
class Mamba1:
    """A layer's weights, and the fold.

    Attributes:
        conv_weight_WE, conv_bias_E: taps, the last one for the newest row.
        x_proj, dt_proj: the small projections, (T, E) -> (T, dt_rank + 2 N) and (T, dt_rank) -> (T, E).
        dt_bias_E: of dt, (E,).
        a_NE: -exp(A_log) transposed, float32.
        d_E: float32.
        norms: weights of the RMS norms of dt, B and C with their epsilon, or None.
    """

    conv_weight_WE: Tensor
    conv_bias_E: Tensor | None
    x_proj: Callable[[Tensor], Tensor]
    dt_proj: Callable[[Tensor], Tensor]
    dt_bias_E: Tensor
    a_NE: Tensor
    d_E: Tensor
    norms: tuple[Tensor, Tensor, Tensor, float] | None = None
    _prepared_for: list[Any] = field(default_factory=list, init=False, repr=False)

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Rows (T, E) -> outputs (T, E) in the rows' dtype."""
        kernels = states.kernels
        conv_weight, conv_bias, dt_bias, a, d = self._prepared(kernels)
        if self.conv_weight_WE.shape[0] > 1:
            x_TE = kernels.causal_conv(rows, conv_weight, conv_bias, states.slots(0))
        else:
            x_TE = F.silu(rows * self.conv_weight_WE[0] + (0 if self.conv_bias_E is None else self.conv_bias_E))
        dt_TE, b_TN, c_TN = self.project(x_TE)
        y_TE = kernels.selective_scan(x_TE, dt_TE, dt_bias, b_TN, c_TN, a, d, states.slots(-1))
        return y_TE.to(rows.dtype), states.written()

    def _prepared(self, kernels: Kernels) -> list[Prepared | None]:
        """The weights that kernels read, prepared once."""
        if self._prepared_for[:1] != [kernels]:
            weights = (self.conv_weight_WE, self.conv_bias_E, self.dt_bias_E, self.a_NE, self.d_E)
            self._prepared_for[:] = [kernels, *(None if w is None else kernels.prepare(w) for w in weights)]
        return self._prepared_for[1:]

    def project(self, x_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt before its bias and softplus (T, E), B and C (T, N) each."""
        dt_b_c, n_states = self.x_proj(x_TE), self.a_NE.shape[0]
        dt_TR, b_TN, c_TN = dt_b_c.split_with_sizes([dt_b_c.shape[1] - 2 * n_states, n_states, n_states], -1)
        if self.norms is not None:
            *weights, eps = self.norms
            dt_TR, b_TN, c_TN = (rms_norm(t, w, eps) for t, w in zip((dt_TR, b_TN, c_TN), weights, strict=True))
        return self.dt_proj(dt_TR), b_TN, c_TN


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, computed in float32 (Zhang & Sennrich 2019)."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
