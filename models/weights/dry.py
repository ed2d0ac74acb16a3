"""Computes a few functions of weights that have no numbers (on "meta") from their shapes.

torch's own versions of these functions import torch._dynamo on "meta", or sympy, which takes more than a second.
torch._dynamo imports triton if it is installed, which writes pages about leaks when the process ends.
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
    # A tensor class with rules of its own can join its parts itself.
    is_plain = type(weights[0]).__torch_dispatch__ is Tensor.__torch_dispatch__
    if weights[0].is_meta and is_plain:
        shape = list(weights[0].shape)
        shape[dim] = sum(weight.shape[dim] for weight in weights)
        return weights[0].new_empty(shape)
    return torch.cat(weights, dim)
