"""Implements short convolutions that are added to their input, after other parts of a layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridmem.memory import RecurrentSpec, Step
from hybridmem.memory.recurrences import CausalConv, ShortConv, short_conv_spec
from hybridmem.models.layers.mamba_mixers import load_conv
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError


def check_taps(n_taps: int) -> None:
    """Raise UnsupportedModelError unless convolutions have two taps at least."""
    if n_taps < 2:
        raise UnsupportedModelError(f"conv_kernel_size={n_taps}; a convolution over a single token remembers nothing")


class ResidualConv:
    """Computes s (x + conv(x)), channel by channel."""

    def __init__(self, layer: int, name: str, weight_WE: Tensor, scale: float = 1.0) -> None:
        self._layer, self._name, self._scale = layer, name, scale
        self._recurrence = ShortConv(CausalConv(weight_WE, activation=False))
        n_taps, n_channels = weight_WE.shape
        self.spec: RecurrentSpec = short_conv_spec(n_channels, n_taps, name)

    @staticmethod
    def load(
        checkpoint: Checkpoint, prefixes: dict[str, int], layer: int, name: str, n_taps: int, scale: float = 1.0
    ) -> ResidualConv:
        """Load the convolutions of several rows that lie beside each other, as one convolution.

        Args:
            prefixes: the names of the convolutions, each with its number of channels.
            name: the name of the recurrence in its layer.
        """
        check_taps(n_taps)
        convs = [
            load_conv(checkpoint, prefix, n_channels, n_taps, has_bias=False, activation=None)
            for prefix, n_channels in prefixes.items()
        ]
        return ResidualConv(layer, name, torch.cat([conv.weight_WE for conv in convs], 1), scale)

    def at(self, layer: int) -> ResidualConv:
        """Return the same convolution with a memory in another layer."""
        other = copy.copy(self)
        other._layer = layer
        return other

    def __call__(self, x_TE: Tensor, step: Step) -> Tensor:
        y_TE = x_TE + self.convolved(x_TE, step)
        return y_TE if self._scale == 1.0 else y_TE * self._scale

    def convolved(self, x_TE: Tensor, step: Step) -> Tensor:
        """Return conv(x)."""
        return step.recur(self._layer, x_TE, self._recurrence, name=self._name)


class DynamicConv:
    """Computes s (x + conv(x)), where taps are those of a channel plus those that each token computes for each head.

    The memory only delays rows. It returns the row of each earlier token in the window, side by side.

    Args:
        taps_WE: the channels' own taps, of which the first one is of the newest row.
        n_heads: how many heads share the E channels.
    """

    def __init__(self, layer: int, name: str, taps_WE: Tensor, n_heads: int, scale: float) -> None:
        (n_taps, n_channels), self._scale = taps_WE.shape, scale
        delays_WF = taps_WE.new_zeros(n_taps, (n_taps - 1) * n_channels)
        for delay in range(1, n_taps):
            delays_WF[n_taps - 1 - delay, (delay - 1) * n_channels : delay * n_channels] = 1
        self._delays = ResidualConv(layer, name, delays_WF)
        self._taps_WHD = taps_WE.view(n_taps, n_heads, -1)
        self.spec: RecurrentSpec = self._delays.spec

    def at(self, layer: int) -> DynamicConv:
        """Return the same convolution with a memory in another layer."""
        other = copy.copy(self)
        other._delays = self._delays.at(layer)
        return other

    def __call__(self, x_TE: Tensor, taps_THW: Tensor, step: Step) -> Tensor:
        n_taps, n_heads, _ = self._taps_WHD.shape
        before = self._delays.convolved(torch.cat([x_TE] * (n_taps - 1), -1), step)
        rows_TWHD = torch.cat([x_TE, before], -1).view(len(x_TE), n_taps, n_heads, -1)
        y_THD: Tensor = (rows_TWHD * (self._taps_WHD + taps_THW.transpose(1, 2)[..., None])).sum(1)
        return (y_THD.flatten(1) + x_TE) * self._scale


@dataclass(frozen=True)
class Convolved:
    """Convolves the outputs of a feed-forward layer."""

    function: Callable[[Tensor], Tensor]
    conv: ResidualConv

    @property
    def specs(self) -> tuple[RecurrentSpec]:
        return (self.conv.spec,)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        return self.conv(self.function(x_TM), step)
