"""Computes products of 16-bit weights that torch multiplies, without rounding their sums to 16 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_AT_ONCE = 1 << 22
"""How many weights are converted to float32 at once, 16 MiB, so that their copies stay in a cache."""

_WRITES_SUMS = "dtype" in torch.ops.aten.mm.overloads()
"""True if torch can write float32 sums of 16-bit products on CUDA devices (from torch 2.8 on)."""


def plain_sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias of x (T, n_in) and a tensor W (n_out, n_in), in float32, or in float64 for such rows.

    On a CPU, weights are converted in parts. Sums are rounded to 16 bits first in three cases: gradients are wanted, so
    that training keeps no copy of the weights; on a CUDA device with a torch before 2.8; and on other devices.
    """
    if x.dtype in (torch.float32, torch.float64):
        return F.linear(x, weight, bias)
    wants_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not wants_gradients and x.device.type == "cpu":
        parts = weight.split(max(1, _AT_ONCE // weight.shape[1]))
        y = torch.cat([F.linear(x.float(), part.float()) for part in parts], 1)
    elif not wants_gradients and x.device.type == "cuda" and _WRITES_SUMS:
        y = torch.mm(x, weight.T, out_dtype=torch.float32)
    else:
        return F.linear(x, weight, bias).float()
    return y if bias is None else y + bias
