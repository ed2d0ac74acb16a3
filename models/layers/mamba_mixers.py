"""Implements the mixers of Mamba and Mamba-2. Convolution windows and states are in the step's memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import FormatError, RecurrentSpec, SpecError, Step
from hybridmem.memory.kernels import Weights, rms_norm
from hybridmem.memory.recurrences import SSD, CausalConv, Mamba1, SSDShape, mamba1_spec
from hybridmem.models.layers.linear import Linear, add_product, normed_products
from hybridmem.models.layers.norms import GatedNorm, SplitNorm
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError
from hybridmem.models.weights.dry import rates_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hybridmem.memory import States


def load_conv(
    checkpoint: Checkpoint, prefix: str, n_channels: int, n_taps: int, *, has_bias: bool, activation: str | None,
    parts: tuple[str, ...] = (),
) -> CausalConv:  # fmt: skip
    """Load a depthwise convolution from torch's layout, (channels, 1, taps).

    Args:
        parts: names that replace `prefix` if the files hold the channels in several tensors, in this order.
    """
    if activation not in (None, "silu", "swish"):
        raise UnsupportedModelError(
            f"{activation!r} as the activation of a mixer; its convolution is implemented with silu only"
        )
    if n_taps < 1:
        raise SpecError(f"{prefix} has {n_taps} taps; a convolution needs one at least")
    names = tuple(f"{part}.weight" for part in parts if f"{part}.weight" in checkpoint) or (f"{prefix}.weight",)
    weight_WE = checkpoint.take_joined(names, n_channels, 1, n_taps).squeeze(1).t().contiguous()
    return CausalConv(
        weight_WE, checkpoint.take_optional(has_bias, f"{prefix}.bias", n_channels), activation is not None
    )


def head_spec(head: int, n_channels: int, n_states: int, n_taps: int) -> RecurrentSpec:
    """Describe the recurrence of one head."""
    return mamba1_spec(n_channels, n_states, n_taps, f"head {head}")


def split_conv(conv: CausalConv, n_heads: int) -> list[CausalConv]:
    """Return the convolution of each head's channels."""
    weights = conv.weight_WE.chunk(n_heads, 1)
    biases = [None] * n_heads if conv.bias_E is None else conv.bias_E.chunk(n_heads)
    return [CausalConv(w.contiguous(), b, conv.activation) for w, b in zip(weights, biases, strict=True)]


def read_dt_limits(config: PreTrainedConfig) -> tuple[float, float]:
    """Return the first two numbers of `time_step_limit`, the limits to which dt is clamped."""
    limits = config.time_step_limit
    if not isinstance(limits, list | tuple) or len(limits) < 2:
        raise FormatError(f"time_step_limit={limits!r}; give two numbers")
    return float(limits[0]), float(limits[1])


def mamba1_at_once(x_proj: Linear, dt_proj: Linear) -> Callable[[Mamba1, States, Tensor], Tensor | None] | None:
    """Return a function that runs a Mamba-1 recurrence over few rows in one call, with the same bits; or None."""
    if x_proj.compiled is None or dt_proj.compiled is None:
        return None
    # The import is here because the module needs numba, and other models work without it.
    from hybridmem.models.layers.mamba1_at_once import Mamba1AtOnce

    return Mamba1AtOnce(x_proj.compiled, dt_proj.compiled)


@dataclass(frozen=True)
class MambaShape:
    """Holds sizes of a Mamba-1 mixer.

    Attributes:
        norm_eps: the epsilon of the norms of dt, B and C, as in Jamba; None if there are no such norms.
        has_norm_weights: whether these norms have weights. Those of FalconMamba have none.
    """

    n_model: int
    n_channels: int
    d_state: int
    d_conv: int
    dt_rank: int
    has_conv_bias: bool
    has_proj_bias: bool
    norm_eps: float | None = None
    has_norm_weights: bool = True
    activation: str = "silu"

    @property
    def spec(self) -> RecurrentSpec:
        return mamba1_spec(self.n_channels, self.d_state, self.d_conv)


class MambaMixer:
    """Computes Mamba-1's mixer, y = W_out(ssm(conv(x)) * silu(z)) (Gu & Dao 2023, Fig. 3)."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, layer: int, shape: MambaShape) -> None:
        n_model, n_channels, d_state, take = shape.n_model, shape.n_channels, shape.d_state, checkpoint.take
        in_bias = checkpoint.take_optional(shape.has_proj_bias, f"{prefix}.in_proj.bias", 2 * n_channels)
        # These are two products, because rows and gate are used apart and would have to be copied out of one result.
        self._rows, self._gate = (
            Linear(weight, bias=bias, activation=activation)
            for weight, bias, activation in zip(
                take(f"{prefix}.in_proj.weight", 2 * n_channels, n_model).chunk(2),
                (None, None) if in_bias is None else in_bias.chunk(2),
                (None, shape.activation),
                strict=True,
            )
        )
        out_bias = checkpoint.take_optional(shape.has_proj_bias, f"{prefix}.out_proj.bias", n_model)
        self._out = Linear(take(f"{prefix}.out_proj.weight", n_model, n_channels), bias=out_bias)
        norms = None
        if shape.norm_eps is not None:
            names = ("dt_layernorm", shape.dt_rank), ("b_layernorm", d_state), ("c_layernorm", d_state)
            norms = SplitNorm(
                shape.norm_eps,
                *(
                    take(f"{prefix}.{name}.weight", size)
                    if shape.has_norm_weights
                    else torch.ones(size, dtype=checkpoint.dtype, device=checkpoint.device)
                    for name, size in names
                ),
            )
        x_proj = Linear(take(f"{prefix}.x_proj.weight", shape.dt_rank + 2 * d_state, n_channels))
        dt_proj = Linear(take(f"{prefix}.dt_proj.weight", n_channels, shape.dt_rank))
        self._recurrence = Mamba1(
            conv=load_conv(
                checkpoint,
                f"{prefix}.conv1d",
                n_channels,
                shape.d_conv,
                has_bias=shape.has_conv_bias,
                activation=shape.activation,
            ),
            x_proj=x_proj,
            dt_proj=dt_proj,
            dt_bias_E=take(f"{prefix}.dt_proj.bias", n_channels),
            a_NE=rates_of(take(f"{prefix}.A_log", n_channels, d_state, dtype=torch.float32)).T.contiguous(),
            d_E=take(f"{prefix}.D", n_channels, dtype=torch.float32),
            norms=norms,
            at_once=mamba1_at_once(x_proj, dt_proj),
        )
        self._layer = layer
        self.specs = (shape.spec,)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        y_TE = step.recur(self._layer, self._rows(x_TM), self._recurrence)
        return self._out(y_TE * self._gate(x_TM))

    def add_to(self, x_TM: Tensor, norm: Callable[[Tensor], Tensor], step: Step, *, scale: float) -> Tensor:
        """Return x + scale * self(norm(x), step)."""
        rows, gate = normed_products(x_TM, norm, self._rows, self._gate)
        return add_product(x_TM, self._out, step.recur(self._layer, rows, self._recurrence), gate, scale=scale)


@dataclass(frozen=True)
class Mamba2Options:
    """Holds sizes and options of a Mamba-2 mixer.

    Attributes:
        norm_eps: the epsilon of the gated norm after the recurrence; None if there is a gate without a norm.
        n_norm_groups: how many parts a row has, each with a norm of its own.
        norms_before_gate: whether the output is norm(y) * silu(gate) instead of norm(y * silu(gate)).
    """

    n_model: int
    shape: SSDShape
    has_conv_bias: bool
    has_in_bias: bool
    has_out_bias: bool
    norm_eps: float | None
    n_norm_groups: int
    norms_before_gate: bool = False
    dt_limits: tuple[float, float] = (0.0, math.inf)
    activation: str = "silu"


class Mamba2Mixer:
    """Computes Mamba-2's mixer, y = W_out norm(ssd(conv(x)) * silu(z)) (Dao & Gu 2024, section 7)."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, layer: int, options: Mamba2Options) -> None:
        shape, n_model, take = options.shape, options.n_model, checkpoint.take
        n_rows = shape.n_channels + shape.n_heads
        in_weight = take(f"{prefix}.in_proj.weight", shape.n_inner + n_rows, n_model)
        in_bias = checkpoint.take_optional(options.has_in_bias, f"{prefix}.in_proj.bias", shape.n_inner + n_rows)
        gate_bias, rows_bias = (None, None) if in_bias is None else torch.split(in_bias, [shape.n_inner, n_rows])
        gate_weight, rows_weight = torch.split(in_weight, [shape.n_inner, n_rows])
        self._gate = Linear(gate_weight, bias=gate_bias, activation=options.activation)
        self._rows = Linear(rows_weight, bias=rows_bias)
        out_bias = checkpoint.take_optional(options.has_out_bias, f"{prefix}.out_proj.bias", n_model)
        self._out = Linear(take(f"{prefix}.out_proj.weight", n_model, shape.n_inner), bias=out_bias)
        self._norm_weight = self._norm = None
        if options.norm_eps is not None:
            self._norm_weight = Weights(take(f"{prefix}.norm.weight", shape.n_inner))
            if not options.norms_before_gate:
                self._norm = GatedNorm(self._norm_weight, options.norm_eps, options.n_norm_groups)
        self._recurrence = SSD(
            shape=shape,
            conv=load_conv(
                checkpoint, f"{prefix}.conv1d", shape.n_channels, shape.d_conv,
                has_bias=options.has_conv_bias, activation=options.activation,
            ),
            dt_bias_H=take(f"{prefix}.dt_bias", shape.n_heads, dtype=torch.float32),
            a_H=rates_of(take(f"{prefix}.A_log", shape.n_heads, dtype=torch.float32)),
            d_H=take(f"{prefix}.D", shape.n_heads, dtype=torch.float32),
            dt_limits=options.dt_limits,
        )  # fmt: skip
        self._layer = layer
        self._options = options
        self.specs = (shape.spec(),)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        y_TI, gate_TI = step.recur(self._layer, self._rows(x_TM), self._recurrence), self._gate(x_TM)
        if self._norm is None:
            return self._out(self._norm_before(y_TI) * gate_TI)
        return self._out(self._norm(y_TI, gate_TI))

    def add_to(self, x_TM: Tensor, norm: Callable[[Tensor], Tensor], step: Step, *, scale: float) -> Tensor:
        """Return x + scale * self(norm(x), step)."""
        rows, gate = normed_products(x_TM, norm, self._rows, self._gate)
        y_TI = self._norm_before(step.recur(self._layer, rows, self._recurrence))
        return add_product(x_TM, self._out, y_TI, gate, self._norm, scale=scale)

    def _norm_before(self, y_TI: Tensor) -> Tensor:
        """Apply the norm to outputs, if it comes before the gate."""
        options, weight = self._options, self._norm_weight
        if weight is None or options.norm_eps is None or not options.norms_before_gate:
            return y_TI
        return rms_norm(y_TI, weight, options.norm_eps, n_groups=options.n_norm_groups)
