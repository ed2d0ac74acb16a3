"""Computes a few functions of weights without numbers, on "meta", by their shapes alone.

torch's own functions for these import torch._dynamo there, or sympy, which takes more than a second. And torch._dynamo
imports triton where that is installed, which writes pages about leaks when the process ends.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rates_of(a_log: Tensor) -> Tensor:
    """Return -exp(A_log), the rates by which states of Mamba and of delta rules decay."""
    return a_log if a_log.is_meta else -a_log.exp()


def with_one_more(weight: Tensor) -> Tensor:
    """Return 1 + weight, by which some norms multiply."""
    return weight if weight.is_meta else 1 + weight


def joined(*weights: Tensor, dim: int = 0) -> Tensor:
    """Return weights one after the other in one dimension: (n_i, ...) become (sum of n_i, ...)."""
    if len(weights) == 1:
        return weights[0]
    # A tensor of a class with rules of its own knows how to join its parts.
    is_plain = type(weights[0]).__torch_dispatch__ is Tensor.__torch_dispatch__
    if weights[0].is_meta and is_plain:
        shape = list(weights[0].shape)
        shape[dim] = sum(weight.shape[dim] for weight in weights)
        return weights[0].new_empty(shape)
    return torch.cat(weights, dim)
