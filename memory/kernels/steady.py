"""Defines functions of torch that give a row the same bits in any batch, for models with reproducible logits.

Torch computes most numbers of a tensor in vectors, and the last few, which do not fill one, by other code. Several
threads have such remainders in the middle of a tensor. So sigmoid, silu, gelu and softplus of a number may have other
bits at another place. `steady` lets a function see rows that fill vectors, in tensors that one thread computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.blocks import Scoped

_VECTORS = 64
"""A multiple of the numbers that torch computes at once, for 16 bits as well."""

_ONE_THREAD = 32768
"""The most numbers of a tensor that torch does not divide between threads."""

Function = Callable[[Tensor], Tensor]


class HeadProducts(Protocol):
    """Declares a product of rows with one matrix for each head."""

    def __call__(self, x_THN: Tensor, weight_HNL: Tensor, bias_HL: Tensor | None = None, /) -> Tensor:
        """Return x_h W_h + b_h, (T, H, L), for x (T, H, N), weights (H, N, L) and perhaps biases (H, L)."""
        ...


wants_reproducible = Scoped[bool]("reproducible", False)
"""True while a model is made whose rows must have the same bits in any batch."""


def steady(function: Function) -> Function:
    """Return an elementwise function of tensors whose bits do not depend on the place of a number, if that is wanted.

    Otherwise it is the function itself.
    """
    return _Steady(function) if wants_reproducible.get() else function


class _Steady:
    def __init__(self, function: Function) -> None:
        self._function = function

    def __call__(self, x: Tensor) -> Tensor:
        n = x.numel()
        if n % _VECTORS == 0 and n <= _ONE_THREAD:
            return self._function(x.contiguous())
        flat = F.pad(x.reshape(-1), (0, -n % _VECTORS))
        return torch.cat([self._function(part) for part in torch.split(flat, _ONE_THREAD)])[:n].view(x.shape)


def head_products() -> HeadProducts:
    """Return a product of rows with one matrix for each head, whose bits do not depend on other rows if wanted."""
    return multiply_by_row if wants_reproducible.get() else _by_torch


def _by_torch(x_THN: Tensor, weight_HNL: Tensor, bias_HL: Tensor | None = None) -> Tensor:
    x_HTN = x_THN.transpose(0, 1)
    if bias_HL is None:
        return (x_HTN @ weight_HNL).transpose(0, 1)
    return torch.baddbmm(bias_HL[:, None], x_HTN, weight_HNL).transpose(0, 1)


def multiply_by_row(x_THN: Tensor, weight_HNL: Tensor, bias_HL: Tensor | None = None) -> Tensor:
    if x_THN.is_meta:
        return _by_torch(x_THN, weight_HNL, bias_HL)
    # The module needs numba, without which other models work.
    from hybridmem.memory.kernels.cpu.head_products import head_products

    return head_products(x_THN, weight_HNL, bias_HL)


class RowProduct:
    """Computes x W^T, (T, L) of x (T, N), for a small weight (L, N).

    If that is wanted while it is made, a row's bits do not depend on other rows.
    """

    def __init__(self, weight_LN: Tensor) -> None:
        self.weight_LN = weight_LN
        self._transposed_1NL = weight_LN.T[None].contiguous() if wants_reproducible.get() else None

    def __call__(self, x_TN: Tensor) -> Tensor:
        if self._transposed_1NL is None:
            return F.linear(x_TN, self.weight_LN)
        return multiply_by_row(x_TN[:, None], self._transposed_1NL)[:, 0]
