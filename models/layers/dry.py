"""Computes a few functions of weights without numbers, on "meta", by their shapes alone.

torch's own functions for these import torch._dynamo there, which takes more than a second.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rates_of(a_log: Tensor) -> Tensor:
    """Return -exp(A_log), the rates by which states of Mamba and of delta rules decay."""
    return torch.empty_like(a_log) if a_log.is_meta else -a_log.exp()


def with_one_more(weight: Tensor) -> Tensor:
    """Return 1 + weight, by which some norms multiply."""
    return weight if weight.is_meta else 1 + weight


def joined(*weights: Tensor) -> Tensor:
    """Return weights (n_i, ...) one below the other, (sum of n_i, ...)."""
    if len(weights) == 1:
        return weights[0]
    if weights[0].is_meta:
        return weights[0].new_empty(sum(len(weight) for weight in weights), *weights[0].shape[1:])
    return torch.cat(weights)
