"""Computes matrix products with weights that are laid out, or rounded, for the processor when they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.kernels import steady
from hybridmem.models.layers.norms import GatedNorm, RMSNorm
from hybridmem.models.products.choice import hold_joined, rows_of
from hybridmem.models.products.plain import plain_sums
from hybridmem.models.weights.checkpoint import Checkpoint
from hybridmem.models.weights.formats import HeldFormat, wanted_format

if TYPE_CHECKING:
    from hybridmem.models.products.few_rows import CompiledProduct
    from hybridmem.models.products.quantised import QuantisedWeight

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Maps names of activations of the supported families to the functions that transformers computes."""


_EXACT = ("relu", "relu2")
"""Activations whose bits are right anywhere."""


def activation_by(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation by its name in transformers' configs."""
    return _activation(name) if name in _EXACT else steady(_activation(name))


@cache
def _activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return torch's activation.

    There is one object for each name, because making a torch module takes longer than all other work for one of a
    thousand experts.
    """
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    # Transformers does not export the class, and importing its module takes long, so that is done only if needed.
    from transformers.activations import ACT2FN

    function: Callable[[Tensor], Tensor] = ACT2FN[name]
    return function


class Linear:
    """Computes y = activation(x W^T + b).

    On the CPU the weights are laid out once, for compiled products (`BlockedWeight`) or, if these are not the fastest,
    for oneDNN (`PackedWeight`). The plain weights are not kept. bfloat16 stays bfloat16 if the processor can multiply
    it. Otherwise 16-bit weights are laid out as float32 (`packed_dtype`). Other dtypes and devices, and a torch built
    without oneDNN, use `F.linear`. Within `weights_in("int8")` or "int4", the weights are rounded to integers instead
    (`QuantisedWeight`).

    Args:
        weights: (n_out, n_in), or several weights (n_out_i, n_in) that share their input. Their outputs are
            concatenated.
        bias: (n_out,) or None.
        activation: its name in transformers' configs, or None.
        format: the format of the weights. The default is what `weights_in` asks for.
        keeps_sums: if True, products are the float32 sums (float64 for rows of float64), which are not rounded to the
            dtype of x: logits that differ in float32 may be equal in bfloat16.
    """

    def __init__(
        self, *weights: Tensor, bias: Tensor | None = None, activation: str | None = None,
        format: HeldFormat | None = None, keeps_sums: bool = False,
    ) -> None:  # fmt: skip
        self.n_out, self.n_in = sum(len(weight) for weight in weights), weights[0].shape[1]
        wanted = wanted_format()
        own = wanted if format is None or wanted == "plain" else format
        self._weight = held = hold_joined(weights, own, keeps_sums=keeps_sums)
        self._keeps_sums = keeps_sums
        fused: Container[str | None] = ()
        if not isinstance(held, Tensor):
            fused = held.FUSED
            bias = None if bias is None else bias.to(held.bias_dtype)
        self._bias = None if bias is None else bias.contiguous()
        self._fused = activation if activation in fused else None
        self._activation = None if activation is None or self._fused else activation_by(activation)
        self.compiled: CompiledProduct | None = None
        if self._activation is None and not isinstance(held, Tensor) and not keeps_sums:
            self.compiled = held.compiled(self._bias, self._fused)

    @property
    def is_packed(self) -> bool:
        """True if the plain weights are not kept."""
        return not isinstance(self._weight, Tensor)

    @property
    def rows(self) -> Tensor | QuantisedWeight | None:
        """Return an object from which single rows can be read, or None if the packed form does not allow that."""
        return rows_of(self._weight)

    @staticmethod
    def load(
        checkpoint: Checkpoint,
        prefix: str,
        n_out: int,
        n_in: int,
        *,
        has_bias: bool = False,
        activation: str | None = None,
        keeps_sums: bool = False,
    ) -> Linear:
        """Load `weight`, and `bias` if `has_bias`, below `prefix`."""
        weight = checkpoint.take(f"{prefix}.weight", n_out, n_in)
        bias = checkpoint.take_optional(has_bias, f"{prefix}.bias", n_out)
        return Linear(weight, bias=bias, activation=activation, keeps_sums=keeps_sums)

    def __call__(self, x: Tensor) -> Tensor:
        """Return (T, n_out) of x (T, n_in), in the dtype of x, or as float32 sums."""
        if isinstance(self._weight, Tensor):
            y = (plain_sums if self._keeps_sums else F.linear)(x, self._weight, self._bias)
        else:
            y = self._weight.multiply(x, self._bias, self._fused, keeps_sums=self._keeps_sums)
        return y if self._activation is None else self._activation(y)


def normed_products(x_TM: Tensor, norm: Callable[[Tensor], Tensor], *linears: Linear) -> list[Tensor]:
    """Return linear(norm(x)) for each of one or two products. For few rows it is one call, with the same bits."""
    plans = [linear.compiled for linear in linears]
    if None not in plans and isinstance(norm, RMSNorm):
        if (found := plans[0].normed(x_TM, norm, *plans[1:])) is not None:  # type: ignore[union-attr]
            return found
    normed = norm(x_TM)
    return [linear(normed) for linear in linears]


def add_product(
    residual_TM: Tensor, linear: Linear, y_TE: Tensor, gate_TE: Tensor | None = None, norm: GatedNorm | None = None,
    *, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return residual + s linear(y * gate), or of norm(y, gate). For few rows it is one call, with the same bits."""
    plan = linear.compiled
    if plan is not None and scale == 1.0 and (found := plan.gated(y_TE, gate_TE, norm, residual_TM)) is not None:
        return found
    if norm is not None:
        y_TE = norm(y_TE, gate_TE)
    elif gate_TE is not None:
        y_TE = y_TE * gate_TE
    return add_scaled(residual_TM, linear(y_TE), scale)


def add_gated_mlp(
    x_TM: Tensor, norm: Callable[[Tensor], Tensor], gate: Linear, up: Linear, down: Linear, *, scale: float
) -> Tensor:
    """Return x + scale * down(gate(norm(x)) * up(norm(x))). For few rows it is one call, with the same bits."""
    plan, up_plan, down_plan = gate.compiled, up.compiled, down.compiled
    if plan is not None and up_plan is not None and down_plan is not None and isinstance(norm, RMSNorm):
        if scale == 1.0 and (found := plan.gated_mlp(x_TM, norm, up_plan, down_plan)) is not None:
            return found
    gate_TF, up_TF = normed_products(x_TM, norm, gate, up)
    return add_product(x_TM, down, up_TF, gate_TF, scale=scale)


def add_scaled(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return x + s y, where s y is rounded to the dtype first.

    torch's own sum with a factor rounds 16-bit numbers in another way at the end of a tensor than before it, so a row's
    bits would depend on the rows beside it.
    """
    return x + y if scale == 1.0 else x + y * scale
