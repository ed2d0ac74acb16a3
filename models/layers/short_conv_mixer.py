"""Implements LFM2's mixer: a short convolution between two gates. Its window is in the step's memory."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hybridmem.memory import Step
from hybridmem.memory.recurrences import ShortConv, short_conv_spec
from hybridmem.models.layers.linear import Linear, add_product, normed_products
from hybridmem.models.layers.mamba_mixers import load_conv
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError


class ShortConvMixer:
    """Computes W_out(C * conv(B * x)) with B, C, x = W_in u (Liquid AI 2025, "LFM2 Technical Report")."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, layer: int, n_model: int, n_taps: int, *, has_bias: bool
    ) -> None:
        if n_taps < 2:
            raise UnsupportedModelError(f"conv_L_cache={n_taps}; a convolution over a single token remembers nothing")

        def linear(name: str, n_out: int) -> Linear:
            bias = checkpoint.take_optional(has_bias, f"{prefix}.{name}.bias", n_out)
            return Linear(checkpoint.take(f"{prefix}.{name}.weight", n_out, n_model), bias=bias)

        self._in, self._out = linear("in_proj", 3 * n_model), linear("out_proj", n_model)
        self._recurrence = ShortConv(
            load_conv(checkpoint, f"{prefix}.conv", n_model, n_taps, has_bias=has_bias, activation=None)
        )
        self._layer = layer
        self.specs = (short_conv_spec(n_model, n_taps),)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        y_TM, out_gate_TM = self._mix(self._in(x_TM), step)
        return self._out(out_gate_TM * y_TM)

    def add_to(self, x_TM: Tensor, norm: Callable[[Tensor], Tensor], step: Step, *, scale: float) -> Tensor:
        """Return x + scale * self(norm(x), step)."""
        (parts,) = normed_products(x_TM, norm, self._in)
        return add_product(x_TM, self._out, *self._mix(parts, step), scale=scale)

    def _mix(self, parts: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Return the convolution's outputs and their gate."""
        in_gate_TM, out_gate_TM, rows_TM = parts.chunk(3, dim=-1)
        return step.recur(self._layer, in_gate_TM * rows_TM, self._recurrence), out_gate_TM
