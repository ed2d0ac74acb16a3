"""Computes RWKV-4's average of values, weighted by decaying exponentials of keys, and the token shift of every RWKV.

Source: Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", eq. 16. Numbers are kept in range as in
appendix D. Replaying old rows needs no matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Generator, Tensor

from hybridmem.memory.kernels import Weights
from hybridmem.memory.recurrences.convolution import CausalConv
from hybridmem.memory.recurrences.registry import register_family
from hybridmem.memory.specs import RecurrentSpec, StateTensor
from hybridmem.memory.state.access import Recurrence, States

_LOWEST = -1e38
"""The exponent that stands for an empty sum. It is about the lowest number to which float32 can still add."""


def rwkv4_spec(n_channels: int, name: str = "recurrence") -> RecurrentSpec:
    """Describe an RWKV-4 layer. Row: k and v.
    State: numerator and denominator, and the exponent by which both are scaled, in float32.
    """
    sums = (StateTensor("numerator", (n_channels,)), StateTensor("denominator", (n_channels,)))
    return RecurrentSpec(
        "rwkv4",
        (2, n_channels),
        (*sums, StateTensor("exponent", (n_channels,), initial=_LOWEST, keeps_dtype=True)),
        name,
    )


@dataclass(frozen=True)
class RWKV4:
    """Advances states by the RWKV-4 recurrence with a layer's weights.

    Attributes:
        decay_E: what is added to the exponent at each token: -exp(time_decay), float32.
        first_E: what is added to the newest token's key for that token's own output, float32.
    """

    decay_E: Tensor
    first_E: Tensor

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Advance the states by rows (T, 2, E); returns outputs (T, E) in the rows' dtype, and the states."""
        k_TE, v_TE = rows.unbind(1)
        decay, first = self._weights.prepared(states.kernels)
        slots = (states.slots(0), states.slots(1), states.slots(2))
        return states.kernels.wkv4(k_TE, v_TE, decay, first, slots).to(rows.dtype), states.written()

    @cached_property
    def _weights(self) -> Weights:
        return Weights(self.decay_E, self.first_E)


def token_shift_spec(n_channels: int, name: str = "token_shift") -> RecurrentSpec:
    """Describe a token shift. Row: a layer's input. State: the last row."""
    return RecurrentSpec(
        "token_shift", (n_channels,), (StateTensor("last", (1, n_channels), dtype=None, ring=()),), name
    )


@dataclass(frozen=True)
class TokenShift:
    """Returns the row before each row, and zeros before the first.
    It is computed as a convolution with two taps, of which the newer one is 0.
    """

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Advance the states by rows (T, E); returns the rows before them (T, E), and the states."""
        return _shift(rows.shape[1], rows.dtype, rows.device)(states, rows), states.written()


@lru_cache
def _shift(n_channels: int, dtype: torch.dtype, device: torch.device) -> CausalConv:
    taps_W1 = torch.tensor([[1.0], [0.0]], dtype=dtype, device=device)
    return CausalConv(taps_W1.repeat(1, n_channels), activation=False)


@register_family("rwkv4")
def example(generator: Generator) -> tuple[RecurrentSpec, Recurrence]:
    decay, first = torch.randn(2, 5, generator=generator)
    return rwkv4_spec(5), RWKV4(-decay.exp(), first)


@register_family("token_shift")
def token_shift_example(generator: Generator) -> tuple[RecurrentSpec, Recurrence]:
    return token_shift_spec(5), TokenShift()
