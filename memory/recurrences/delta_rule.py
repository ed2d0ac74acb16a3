"""Computes the gated delta rule after a short convolution: each token first erases along its key, then writes.

Sources: Yang et al. 2024, "Gated Delta Networks", eq. 10, with one decay for each head (Qwen3-Next, Qwen3.5), and Kimi
Team 2025, "Kimi Linear", eq. 1, with one decay for each key channel. For each head, with S as (V, N), k and q of length
1, and q then scaled by 1 / sqrt(N):

    q, k, v = silu(conv(row))     w = exp(-exp(A_log) softplus(a + b_a))
    S = S diag(w)                 S = S + beta (v - S k) k^T     y = S q

The output's norm and gate have no state, so the model computes them. Replaying old rows needs no matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor

from hybridmem.memory.errors import SpecError
from hybridmem.memory.kernels import Erase, Weights
from hybridmem.memory.recurrences.convolution import CausalConv, window_tensors
from hybridmem.memory.recurrences.registry import register_family
from hybridmem.memory.specs import RecurrentSpec, matrix_tensor
from hybridmem.memory.state.access import Recurrence, States


@dataclass(frozen=True)
class DeltaRuleShape:
    """Holds the sizes of a layer with the gated delta rule.

    Attributes:
        n_heads, value_dim: the number of value heads, and the size of each. n_heads is a multiple of n_key_heads.
        n_key_heads, key_dim: the number of heads of queries and keys, and the size of each.
        d_conv: the number of taps of the convolution.
        decays_keys: True if each key channel has a decay of its own.
    """

    n_heads: int
    n_key_heads: int
    value_dim: int
    key_dim: int
    d_conv: int
    decays_keys: bool = False

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not isinstance(size, int) or (size < 1 and name != "decays_keys"):
                raise SpecError(f"DeltaRuleShape.{name} is {size!r}; it must be an integer of at least 1")
        if self.n_heads % self.n_key_heads:
            raise SpecError(f"{self.n_heads} value heads cannot share {self.n_key_heads} key heads evenly")

    @property
    def n_keys(self) -> int:
        return self.n_key_heads * self.key_dim

    @property
    def n_channels(self) -> int:
        """Return the number of channels that are convolved: q, k and v."""
        return 2 * self.n_keys + self.n_heads * self.value_dim

    @property
    def n_decays(self) -> int:
        return self.n_heads * (self.key_dim if self.decays_keys else 1)

    def spec(self, name: str = "recurrence") -> RecurrentSpec:
        """Describe the layer's recurrence. Row: q, k and v before the convolution, beta, and a before its bias.
        State: the convolution's window, and S, (H, V, N).
        """
        s = matrix_tensor(
            "delta", self.n_heads, self.value_dim, self.key_dim, self.n_key_heads, decays_keys=self.decays_keys
        )
        family = "kimi_delta" if self.decays_keys else "gated_delta"
        row = self.n_channels + self.n_heads + self.n_decays
        return RecurrentSpec(family, (row,), (*window_tensors(self.n_channels, self.d_conv), s), name)


@dataclass(frozen=True)
class DeltaRule:
    """Advances states by the gated delta rule with a layer's weights.

    Attributes:
        a_bias_A: (n_decays,) float32, which is added to a.
        rate_A: (n_decays,) float32, which is -exp(A_log). If each key channel has a decay, the number of each head is
            repeated for its channels. If both attributes are None, the model computes the decays, and rows hold their
            logarithms in place of a.
    """

    shape: DeltaRuleShape
    conv: CausalConv
    a_bias_A: Tensor | None
    rate_A: Tensor | None

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Advance the states by rows (T, row); returns outputs (T, H V) in the rows' dtype, and the states."""
        shape = self.shape
        x_TE = self.conv(states, rows)
        qk, v, kernels = x_TE[:, : 2 * shape.n_keys], x_TE[:, 2 * shape.n_keys :], states.kernels
        a_bias, to_length = self._weights.prepared(kernels)
        # This is x / |x| as in flash-linear-attention, with 1e-6 under the root, computed as an RMS norm whose weights
        # set the length.
        qk = kernels.rms_norm(qk.float(), to_length, 1e-6 / shape.key_dim, n_groups=2 * shape.n_key_heads)
        q_TGN, k_TGN = qk.view(len(rows), 2, shape.n_key_heads, shape.key_dim).unbind(1)
        beta_TH = rows[:, shape.n_channels : shape.n_channels + shape.n_heads]
        log_decay = rows[:, shape.n_channels + shape.n_heads :]
        if self.rate_A is not None:
            log_decay = kernels.softplus(log_decay, a_bias) * self.rate_A
        if shape.decays_keys:
            log_decay = log_decay.view(len(rows), shape.n_heads, shape.key_dim)
        erase = Erase(k_TGN, None, after_decay=True)
        v_THV = v.view(len(rows), shape.n_heads, shape.value_dim)
        y_THV = kernels.matrix_scan(q_TGN, k_TGN, v_THV, log_decay, erase, states.slots(-1), strength_TH=beta_TH)
        return y_THV.flatten(1).to(rows.dtype), states.written()

    @cached_property
    def _weights(self) -> Weights:
        n, key_dim = self.shape.n_keys, self.shape.key_dim
        # These are weights of the norm: q gets the length 1 / sqrt(N), k the length 1.
        factors = (1.0 / key_dim, key_dim**-0.5)
        to_length = torch.cat([torch.full((n,), factor, dtype=torch.float32) for factor in factors])
        return Weights(self.a_bias_A, to_length.to(self.conv.weight_WE.device))


def _example(generator: Generator, *, decays_keys: bool) -> tuple[RecurrentSpec, Recurrence]:
    n_key_heads = 6 if decays_keys else 3
    shape = DeltaRuleShape(
        n_heads=6, n_key_heads=n_key_heads, value_dim=4, key_dim=5, d_conv=3, decays_keys=decays_keys
    )

    def weights(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    conv = CausalConv(weights(3, shape.n_channels))
    return shape.spec(), DeltaRule(shape, conv, weights(shape.n_decays), -weights(shape.n_decays).exp() / 4)


@register_family("gated_delta")
def example(generator: Generator) -> tuple[RecurrentSpec, Recurrence]:
    return _example(generator, decays_keys=False)


@register_family("kimi_delta")
def example_by_channel(generator: Generator) -> tuple[RecurrentSpec, Recurrence]:
    return _example(generator, decays_keys=True)
