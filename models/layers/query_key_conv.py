"""Implements convolutions over queries and keys, as in compressed convolutional attention (Figliolia et al. 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridmem.memory import RecurrentSpec, Step
from hybridmem.memory.kernels import head_products
from hybridmem.memory.recurrences import CausalConv, ShortConv, short_conv_spec

NAME = "queries_keys"
"""Name of the recurrence in its layer."""


class QueryKeyConv:
    """Convolves queries and keys by channel, then by head, and delays the other elements of their rows by one token.

    Both convolutions and the delay are one recurrence, a convolution by channel: its rows hold queries and keys once
    for each tap of the convolution by head, which gets them convolved already, each copy a token later than the other.

    Args:
        by_channel: taps (E, 1, W) and biases (E,).
        by_head: taps (E, D, W) and biases (E,), where each head of D channels is mixed with itself.
        n_delayed: number of channels that are only delayed.
    """

    def __init__(self, by_channel: tuple[Tensor, Tensor], by_head: tuple[Tensor, Tensor], n_delayed: int) -> None:
        (taps_E1W, bias_E), (mixing_EDW, mixing_bias_E) = by_channel, by_head
        n_channels, head_dim, self._n_copies = mixing_EDW.shape
        n_own = taps_E1W.shape[2]
        n_taps = max(n_own + self._n_copies - 1, 2)
        weight_WE = taps_E1W.new_zeros(n_taps, self._n_copies * n_channels + n_delayed)
        for delay in range(self._n_copies):
            first = n_taps - n_own - delay
            own = weight_WE[first : first + n_own, delay * n_channels : (delay + 1) * n_channels]
            own.copy_(taps_E1W[:, 0].T)
        weight_WE[n_taps - 2, self._n_copies * n_channels :] = 1
        self._recurrence = ShortConv(CausalConv(weight_WE, activation=False))
        self.spec: RecurrentSpec = short_conv_spec(weight_WE.shape[1], n_taps, NAME)
        # The axes are heads, inputs of all copies, outputs. The newest copy comes first, and the newest tap last.
        mixing = mixing_EDW.reshape(-1, head_dim, head_dim, self._n_copies).flip(-1)
        self._mixing = mixing.permute(0, 3, 2, 1).reshape(len(mixing), -1, head_dim).contiguous()
        # The first convolution also adds its bias to the zeros before a sequence. So one sum serves all tokens.
        constant_HDD = mixing_EDW.float().sum(2).view(-1, head_dim, head_dim)
        biases_HD1 = (bias.float().view(-1, head_dim, 1) for bias in (mixing_bias_E, bias_E))
        bias_HD1 = torch.baddbmm(next(biases_HD1), constant_HDD, next(biases_HD1))
        self._bias_HD = bias_HD1.flatten(1).to(mixing_bias_E.dtype)
        self._multiply = head_products()
        self._sizes = [self._n_copies * n_channels, n_delayed]

    def __call__(self, layer: int, qk_TE: Tensor, delayed_TE: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Return queries and keys (T, H, D), and the rows before those of `delayed_TE`, zeros before the first."""
        rows = torch.cat([*[qk_TE] * self._n_copies, delayed_TE], -1)
        y_TE = step.recur(layer, rows, self._recurrence, name=NAME)
        copies, before_TE = y_TE.split_with_sizes(self._sizes, -1)
        n_heads, head_dim = self._bias_HD.shape
        x_THC = copies.view(len(rows), self._n_copies, n_heads, head_dim).transpose(1, 2).flatten(2)
        return self._multiply(x_THC, self._mixing, self._bias_HD), before_TE


def around(q_THD: Tensor, k_TGD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the terms to add to convolved queries and keys: means of each query and its key, and of each group."""
    n_tokens, n_groups, head_dim = k_TGD.shape
    q_TGSD = (q_THD.reshape(n_tokens, n_groups, -1, head_dim) + k_TGD[:, :, None]) * 0.5
    return q_TGSD.flatten(1, 2), q_TGSD.mean(2)
