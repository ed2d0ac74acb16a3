"""Implements the mixer of Qwen3-Next and Qwen3.5: a gated delta rule after a short convolution, with norm and gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import RecurrentSpec, Step
from hybridmem.memory.kernels import steady
from hybridmem.memory.recurrences import DeltaRule, DeltaRuleShape
from hybridmem.models.layers.linear import Linear, add_product, normed_products
from hybridmem.models.layers.mamba_mixers import load_conv
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.weights.checkpoint import Checkpoint
from hybridmem.models.weights.dry import joined, rates_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NAME = "recurrence"
"""Name of the recurrence in its layer, which may have others."""


def delta_shape_of(config: PreTrainedConfig) -> DeltaRuleShape:
    """Return the sizes of a gated delta rule from a config that names them as Qwen3-Next's does."""
    return DeltaRuleShape(
        config.linear_num_value_heads,
        config.linear_num_key_heads,
        config.linear_value_head_dim,
        config.linear_key_head_dim,
        config.linear_conv_kernel_dim,
    )


@dataclass(frozen=True)
class DeltaInputs:
    """Holds the weights of a delta mixer's input products, (n_out, n_model) each.

    Attributes:
        qkv: queries of all heads, then keys, then values.
        gate: z, as large as the values.
        b, a: one number for each value head.
    """

    qkv: Tensor
    gate: Tensor
    b: Tensor
    a: Tensor

    @staticmethod
    def take(checkpoint: Checkpoint, prefix: str, n_model: int, shape: DeltaRuleShape) -> DeltaInputs:
        """Load the weights as Qwen3.5 stores them, each as a separate matrix."""
        sizes = {"qkv": shape.n_channels, "z": shape.n_heads * shape.value_dim, "b": shape.n_heads, "a": shape.n_heads}
        return DeltaInputs(
            *(checkpoint.take(f"{prefix}.in_proj_{name}.weight", size, n_model) for name, size in sizes.items())
        )

    @staticmethod
    def take_by_key_head(checkpoint: Checkpoint, prefix: str, n_model: int, shape: DeltaRuleShape) -> DeltaInputs:
        """Load the weights as Qwen3-Next stores them: in two matrices, whose rows are grouped by key head."""
        n_per_key, n_groups = shape.n_heads // shape.n_key_heads, shape.n_key_heads
        n_values = n_per_key * shape.value_dim
        n_qkvz = shape.n_channels + shape.n_heads * shape.value_dim
        qkvz, ba = (
            checkpoint.take(f"{prefix}.{name}.weight", n, n_model).reshape(n_groups, -1, n_model)
            for name, n in (("in_proj_qkvz", n_qkvz), ("in_proj_ba", 2 * shape.n_heads))
        )
        parts = (*qkvz.split_with_sizes([shape.key_dim, shape.key_dim, n_values, n_values], 1), *ba.chunk(2, 1))
        q, k, v, gate, b, a = (part.flatten(0, 1) for part in parts)
        return DeltaInputs(joined(q, k, v), gate, b, a)


class DeltaMixer:
    """Computes W_out(norm(delta(conv(q, k, v), beta, a)) * silu(z)), with a norm over each value head.

    Yang et al. 2024, Fig. 1.

    Args:
        most_beta: the number below which beta stays. If it is 2, a token may also flip the sign of what the state holds
            along its key (Grazzini et al. 2024, "Unlocking State-Tracking in Linear RNNs through Negative
            Eigenvalues").
        norm, out: the names of the norm and of the last product.
        conv_parts: see `load_conv`.
        gate_activation: what is applied to z.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        layer: int,
        shape: DeltaRuleShape,
        inputs: DeltaInputs,
        *,
        norm_eps: float,
        activation: str,
        most_beta: float = 1.0,
        norm: str = "norm",
        out: str = "out_proj",
        conv_parts: tuple[str, ...] = (),
        gate_activation: str = "silu",
    ) -> None:
        take, n_inner, n_model = checkpoint.take, shape.n_heads * shape.value_dim, inputs.qkv.shape[1]
        self._rows = Linear(inputs.qkv, inputs.b, inputs.a)
        self._gate = Linear(inputs.gate, activation=gate_activation)
        self._norm = RMSNorm(take(f"{prefix}.{norm}.weight", shape.value_dim), norm_eps)
        self._out = Linear(take(f"{prefix}.{out}.weight", n_model, n_inner))
        self._recurrence = DeltaRule(
            shape=shape,
            conv=load_conv(
                checkpoint,
                f"{prefix}.conv1d",
                shape.n_channels,
                shape.d_conv,
                has_bias=False,
                activation=activation,
                parts=conv_parts,
            ),
            a_bias_A=take(f"{prefix}.dt_bias", shape.n_heads, dtype=torch.float32),
            rate_A=rates_of(take(f"{prefix}.A_log", shape.n_heads, dtype=torch.float32)),
        )
        self._layer, self._most_beta, self._sigmoid = layer, most_beta, steady(torch.sigmoid)

    @property
    def specs(self) -> tuple[RecurrentSpec]:
        return (self._recurrence.shape.spec(NAME),)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        return self._out(self._mix(self._rows(x_TM), step) * self._gate(x_TM))

    def add_to(self, x_TM: Tensor, norm: Callable[[Tensor], Tensor], step: Step, *, scale: float) -> Tensor:
        """Return x + scale * self(norm(x), step)."""
        rows_TR, gate = normed_products(x_TM, norm, self._rows, self._gate)
        return add_product(x_TM, self._out, self._mix(rows_TR, step), gate, scale=scale)

    def _mix(self, rows_TR: Tensor, step: Step) -> Tensor:
        """Return the recurrence's outputs after the norm. The rows are changed."""
        shape = self._recurrence.shape
        beta_TH = rows_TR[:, shape.n_channels : shape.n_channels + shape.n_heads]
        if self._most_beta == 1.0 and self._sigmoid is torch.sigmoid:
            beta_TH.sigmoid_()
        else:
            beta_TH.copy_(self._sigmoid(beta_TH) * self._most_beta)
        y_TI = step.recur(self._layer, rows_TR, self._recurrence, name=NAME)
        return self._norm(y_TI.view(len(y_TI), shape.n_heads, shape.value_dim)).flatten(1)
