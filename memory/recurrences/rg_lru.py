"""Computes the real-gated linear recurrent unit of Griffin and RecurrentGemma, after a short convolution.

Source: De et al. 2024, "Griffin", eq. 1-4. For each channel, with gates from block-diagonal projections of the
convolved input:

    x = conv(row)               r = sigmoid(W_r x + b_r)     i = sigmoid(W_i x + b_i)
    a = exp(-8 r softplus(p))   h = a h + sqrt(1 - a^2) i x      y = h

The first token of a sequence is added without the factor of the square root. The gates are part of the recurrence, so
replaying old rows repeats their matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from hybridmem.memory.kernels import HeadProducts, head_products, steady
from hybridmem.memory.kernels.steady import Function
from hybridmem.memory.recurrences.convolution import CausalConv, window_tensors
from hybridmem.memory.recurrences.registry import register_family
from hybridmem.memory.specs import RecurrentSpec, StateTensor
from hybridmem.memory.state.access import Recurrence, States

_SHARPNESS = 8.0
"""The constant c of the paper."""


def rg_lru_spec(n_channels: int, d_conv: int, name: str = "recurrence") -> RecurrentSpec:
    """Describe an RG-LRU layer. Row: the channels before the convolution.
    State: the convolution's window, and h in float32.
    """
    return RecurrentSpec(
        "rg_lru", (n_channels,), (*window_tensors(n_channels, d_conv), StateTensor("lru", (n_channels,))), name
    )


@dataclass(frozen=True)
class RGLRU:
    """Advances states by the RG-LRU recurrence with a layer's weights.

    Attributes:
        gate_weight_BIO, gate_bias_BO: the block-diagonal projections to both gates, in B blocks of width I. Each block
            has O = 2 I outputs, with those of the input gate first.
        decay_E: softplus(p), float32.
        multiply, sigmoid: compute the gates.
    """

    conv: CausalConv
    gate_weight_BIO: Tensor
    gate_bias_BO: Tensor
    decay_E: Tensor
    multiply: HeadProducts = field(default_factory=head_products)
    sigmoid: Function = field(default_factory=lambda: steady(torch.sigmoid))

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Advance the states by rows (T, E); returns outputs (T, E) in the rows' dtype, and the states."""
        x_TE = self.conv(states, rows)
        x_TBI = x_TE.view(len(rows), *self.gate_weight_BIO.shape[:2])
        gates_TBO = self.sigmoid(self.multiply(x_TBI, self.gate_weight_BIO, self.gate_bias_BO))
        input_TE, recurrent_TE = (gate.flatten(1) for gate in gates_TBO.chunk(2, dim=-1))
        log_a_TE = -_SHARPNESS * recurrent_TE.float() * self.decay_E
        share_TE = -torch.expm1(2 * log_a_TE)
        first_rows = states.device_cu_rows[:-1]
        # A segment without a source state is the beginning of its sequence.
        is_begin = torch.as_tensor(states.sources[-1]) < 0
        share_TE[first_rows] = share_TE[first_rows].masked_fill_(is_begin[:, None], 1.0)
        y_TE = states.kernels.linear_scan((x_TE * input_TE).float() * share_TE.sqrt(), log_a_TE.exp(), states.slots(-1))
        return y_TE.to(rows.dtype), states.written()


@register_family("rg_lru", is_exact=False)
def example(generator: Generator) -> tuple[RecurrentSpec, Recurrence]:
    def weights(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    conv = CausalConv(weights(4, 6), weights(6), activation=False)
    return rg_lru_spec(6, 4), RGLRU(conv, weights(2, 3, 6), weights(2, 6), F.softplus(weights(6) - 2))
