"""Implements short convolutions that are added to their input, after other parts of a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridmem.memory import RecurrentSpec, Step
from hybridmem.memory.recurrences import CausalConv, ShortConv, short_conv_spec
from hybridmem.models.layers.mamba_mixers import load_conv
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError


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
        """Load convolutions of rows that lie beside each other, as one.

        Args:
            prefixes: the names of the convolutions, each with its number of channels.
            name: the name of the recurrence in its layer.
        """
        if n_taps < 2:
            raise UnsupportedModelError(
                f"conv_kernel_size={n_taps}; a convolution over a single token remembers nothing"
            )
        convs = [
            load_conv(checkpoint, prefix, n_channels, n_taps, has_bias=False, activation=None)
            for prefix, n_channels in prefixes.items()
        ]
        return ResidualConv(layer, name, torch.cat([conv.weight_WE for conv in convs], 1), scale)

    def __call__(self, x_TE: Tensor, step: Step) -> Tensor:
        y_TE = x_TE + step.recur(self._layer, x_TE, self._recurrence, name=self._name)
        return y_TE if self._scale == 1.0 else y_TE * self._scale


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
