"""Computes Mamba-2's state space duality after a convolution: one decay per head, B and C shared by groups of heads.

Source: Dao & Gu 2024, "Transformers are SSMs", eq. 16 and section 7. In the words of the paper, for each head with its
x, dt and A, and with B and C (keys and queries) of its group:

    x, B, C = silu(conv(row))     dt = clamp(softplus(dt + b_dt))
    h = exp(dt A) h + dt x B^T    y = h C + D x

The gate and the norm after it hold no state, so they stay with the model. A replay holds no matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from hybridmem.memory.errors import SpecError
from hybridmem.memory.kernels import Kernels, StateSlots, Weights
from hybridmem.memory.recurrences.convolution import CausalConv, window_tensors
from hybridmem.memory.recurrences.registry import register_family
from hybridmem.memory.specs import RecurrentSpec, matrix_tensor
from hybridmem.memory.state.access import Recurrence, States


@dataclass(frozen=True)
class SSDShape:
    """Holds the sizes of a Mamba-2 layer.

    Attributes:
        n_heads, head_dim: the number of heads, and the number of channels of each.
        n_groups, d_state: the number of groups of heads that share B and C, and the size of each B and C.
        d_conv: the number of taps of the convolution.
    """

    n_heads: int
    head_dim: int
    n_groups: int
    d_state: int
    d_conv: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not isinstance(size, int) or size < 1:
                raise SpecError(f"SSDShape.{name} is {size!r}; it must be an integer of at least 1")
        if self.n_heads % self.n_groups:
            raise SpecError(f"{self.n_heads} heads cannot share {self.n_groups} groups of B and C evenly")

    @property
    def n_inner(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def n_channels(self) -> int:
        """Return the number of channels that are convolved: x, B and C."""
        return self.n_inner + 2 * self.n_groups * self.d_state

    def spec(self, name: str = "recurrence") -> RecurrentSpec:
        """Describe the layer's recurrence. Row: x, B and C before the convolution, and dt before its bias.
        State: the convolution's window, and h, (H, P, N) in float32.
        """
        h = matrix_tensor("ssm", self.n_heads, self.head_dim, self.d_state, self.n_groups)
        return RecurrentSpec(
            "ssd", (self.n_channels + self.n_heads,), (*window_tensors(self.n_channels, self.d_conv), h), name
        )


@dataclass(frozen=True)
class SSD:
    """Advances states by the Mamba-2 recurrence with a layer's weights.

    Attributes:
        dt_bias_H, a_H, d_H: float32 weights; a_H is -exp(A_log). d_H may be None.
        dt_limits: the least and the greatest dt. Other values are clamped to these.
    """

    shape: SSDShape
    conv: CausalConv
    dt_bias_H: Tensor
    a_H: Tensor
    d_H: Tensor | None
    dt_limits: tuple[float, float] = (0.0, math.inf)

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Advance the states by rows (T, E + H); returns outputs (T, H P) in the rows' dtype, and the states."""
        shape, conv = self.shape, self.conv
        if states.tails is None and shape.d_conv > 1 and (at_once := self._at_once(states.kernels)) is not None:
            return at_once(rows, states.slots(0), states.slots(-1)), states.written()
        x_TE = conv(states, rows)
        n_keys = shape.n_groups * shape.d_state
        x_TI, b_TK, c_TK = x_TE.split_with_sizes([shape.n_inner, n_keys, n_keys], -1)
        x_THP = x_TI.view(len(rows), shape.n_heads, shape.head_dim)
        b_TGN, c_TGN = (t.view(len(rows), shape.n_groups, shape.d_state) for t in (b_TK, c_TK))
        dt_bias, _, skip = self._weights.prepared(states.kernels)
        dt_TH = states.kernels.softplus(rows[:, shape.n_channels :], dt_bias)
        if self.dt_limits != (0.0, math.inf):
            dt_TH = dt_TH.clamp(*self.dt_limits)
        y_THP = states.kernels.matrix_scan(
            c_TGN, b_TGN, x_THP, dt_TH * self.a_H, None, states.slots(-1), strength_TH=dt_TH, skip_H=skip
        )
        return y_THP.flatten(1).to(rows.dtype), states.written()

    @cached_property
    def _weights(self) -> Weights:
        return Weights(self.dt_bias_H, self.a_H, self.d_H)

    def _at_once(self, kernels: Kernels) -> Callable[[Tensor, StateSlots, StateSlots], Tensor] | None:
        """Return the function of these kernels that computes a whole call at once, or None if they have none."""
        if (of := getattr(kernels, "SSDLayer", None)) is None:
            return None
        if (layer := self._layers.get(of)) is None:
            weights = *self.conv.prepared(kernels), *self._weights.prepared(kernels)
            layer = of(*weights, self.dt_limits, self.shape.n_groups, activation=self.conv.activation)
            self._layers[of] = layer
        return layer

    @cached_property
    def _layers(self) -> dict[Any, Callable[[Tensor, StateSlots, StateSlots], Tensor]]:
        """Return a cache: a class of kernels -> the function that it has made for these weights."""
        return {}


@register_family("ssd")
def example(generator: Generator) -> tuple[RecurrentSpec, Recurrence]:
    shape = SSDShape(n_heads=6, head_dim=3, n_groups=2, d_state=5, d_conv=4)

    def weights(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    conv = CausalConv(weights(4, shape.n_channels), weights(shape.n_channels))
    return shape.spec(), SSD(shape, conv, weights(6), -weights(6).exp() / 4, weights(6))
