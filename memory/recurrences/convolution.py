"""Computes the short causal convolution over channels, alone (LFM2) or before another recurrence.

y_t = sum over w of weight_w x_{t - W + 1 + w}. It is "depthwise": each channel has its own taps. The state is the last
W - 1 rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from hybridmem.memory.kernels import Kernels, Prepared, Weights, steady
from hybridmem.memory.kernels.steady import Function
from hybridmem.memory.recurrences.registry import register_family
from hybridmem.memory.specs import RecurrentSpec, StateTensor
from hybridmem.memory.state.access import Recurrence, States


def window_tensors(n_channels: int, n_taps: int) -> tuple[StateTensor, ...]:
    """Return the state of a convolution: its last n_taps - 1 rows in the memory's dtype; none for one tap."""
    return (StateTensor("conv", (n_taps - 1, n_channels), dtype=None, ring=()),) if n_taps > 1 else ()


@dataclass(frozen=True)
class CausalConv:
    """Convolves rows with weights (W, E).

    Attributes:
        weight_WE: taps, the last one for the newest row.
        bias_E: bias, or None.
        activation: True to apply silu afterwards.
        silu: what is applied after a convolution of a single tap.
    """

    weight_WE: Tensor
    bias_E: Tensor | None = None
    activation: bool = True
    silu: Function = field(default_factory=lambda: steady(F.silu), repr=False, compare=False)

    def __call__(self, states: States, rows_TR: Tensor) -> Tensor:
        """Convolve the first E elements of each row: (T, E). State 0 is the convolution's window."""
        n_taps, n_channels = self.weight_WE.shape
        if n_taps > 1:
            weight, bias = self.prepared(states.kernels)
            return states.kernels.causal_conv(rows_TR, weight, bias, states.slots(0), activation=self.activation)
        out_TE = rows_TR[:, :n_channels] * self.weight_WE[0] + (0 if self.bias_E is None else self.bias_E)
        return self.silu(out_TE) if self.activation else out_TE

    def prepared(self, kernels: Kernels) -> list[Prepared]:
        """Return taps and bias in the form that these kernels take."""
        return self._weights.prepared(kernels)

    @cached_property
    def _weights(self) -> Weights:
        return Weights(self.weight_WE, self.bias_E)


def short_conv_spec(n_channels: int, n_taps: int, name: str = "recurrence") -> RecurrentSpec:
    """Describe a layer with this recurrence only. Row: the E channels. State: the last n_taps - 1 rows; n_taps >= 2."""
    return RecurrentSpec("short_conv", (n_channels,), window_tensors(n_channels, n_taps), name)


@dataclass(frozen=True)
class ShortConv:
    """Convolves rows, as the only recurrence of its layer. The gates of its input and output belong to the model."""

    conv: CausalConv

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Advance the states by rows (T, E); returns outputs (T, E) in the rows' dtype, and the states."""
        return self.conv(states, rows), states.written()


@register_family("short_conv")
def example(generator: Generator) -> tuple[RecurrentSpec, Recurrence]:
    weight = torch.randn(3, 5, generator=generator)
    return short_conv_spec(5, 3), ShortConv(CausalConv(weight, torch.randn(5, generator=generator), activation=False))
