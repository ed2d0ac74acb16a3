"""Implements feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridmem.memory.kernels import steady
from hybridmem.models.layers.linear import Linear, activation_by, add_gated_mlp, add_product, normed_products
from hybridmem.models.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class MLP:
    """Computes W_down act(W_up x)."""

    up: Linear
    down: Linear

    @staticmethod
    def load(
        checkpoint: Checkpoint, prefix: str, n_model: int, n_inner: int, activation: str, *, has_bias: bool = False
    ) -> MLP:
        """Load `up_proj` and `down_proj` below `prefix`."""

        def linear(name: str, n_out: int, n_in: int, activation: str | None = None) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", n_out, n_in, has_bias=has_bias, activation=activation)

        return MLP(linear("up_proj", n_inner, n_model, activation), linear("down_proj", n_model, n_inner))

    def __call__(self, x_TM: Tensor) -> Tensor:
        return self.down(self.up(x_TM))

    def add_to(self, x_TM: Tensor, norm: Callable[[Tensor], Tensor], *, scale: float) -> Tensor:
        """Return x + scale * self(norm(x))."""
        (up,) = normed_products(x_TM, norm, self.up)
        return add_product(x_TM, self.down, up, scale=scale)


@dataclass(frozen=True)
class ClampedMLP:
    """Computes W_down(act(min(W_gate x, limit)) * clamp(W_up x, -limit, limit))."""

    gate: Linear
    up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]
    limit: float

    @staticmethod
    def of(mlp: GatedMLP, activation: str, limit: float) -> ClampedMLP:
        """Return an MLP with the products of another, which was loaded without activation."""
        return ClampedMLP(mlp.gate, mlp.up, mlp.down, activation_by(activation), limit)

    def __call__(self, x_TM: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate(x_TM).clamp(max=self.limit), self.up(x_TM).clamp(-self.limit, self.limit)
        return self.down(self.activation(gate_TF) * up_TF)


@dataclass(frozen=True)
class CappedMLP:
    """Computes W_down(cap(g) sigmoid(g) cap(W_up x)) with g = W_gate x, where cap(z) = c tanh(z / c).

    Attributes:
        caps: c for the gate, and c for what it multiplies.
    """

    gate: Linear
    up: Linear
    down: Linear
    caps: tuple[float, float]
    _tanh: Callable[[Tensor], Tensor] = field(default_factory=lambda: steady(torch.tanh))
    _sigmoid: Callable[[Tensor], Tensor] = field(default_factory=lambda: steady(torch.sigmoid))

    def __call__(self, x_TM: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate(x_TM), self.up(x_TM)
        capped = (self._tanh(x / cap) * cap for x, cap in zip((gate_TF, up_TF), self.caps, strict=True))
        return self.down(next(capped) * self._sigmoid(gate_TF) * next(capped))


@dataclass(frozen=True)
class GatedMLP:
    """Computes W_down(act(W_gate x) * W_up x) (Shazeer 2020)."""

    gate: Linear
    up: Linear
    down: Linear

    @staticmethod
    def load(
        checkpoint: Checkpoint, prefix: str, n_model: int, n_inner: int, activation: str | None, *,
        has_bias: bool = False, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> GatedMLP:  # fmt: skip
        """Load the products below `prefix` that `names` gives as gate, up and down."""

        def linear(name: str, n_out: int, n_in: int, activation: str | None = None) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", n_out, n_in, has_bias=has_bias, activation=activation)

        gate, up, down = names
        return GatedMLP(
            linear(gate, n_inner, n_model, activation), linear(up, n_inner, n_model), linear(down, n_model, n_inner)
        )

    @staticmethod
    def of(gate_up: Tensor, down: Tensor, activation: str | None) -> GatedMLP:
        """Make the MLP from weights (2 n_inner, n_model), with the rows of the gate first, and (n_model, n_inner)."""
        gate, up = gate_up.chunk(2)
        return GatedMLP(Linear(gate, activation=activation), Linear(up), Linear(down))

    def __call__(self, x_TM: Tensor) -> Tensor:
        return self.down(self.gate(x_TM) * self.up(x_TM))

    def add_to(self, x_TM: Tensor, norm: Callable[[Tensor], Tensor], *, scale: float) -> Tensor:
        """Return x + scale * self(norm(x))."""
        return add_gated_mlp(x_TM, norm, self.gate, self.up, self.down, scale=scale)
