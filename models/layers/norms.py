"""Implements norms. `memory.interface` has the legend of shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.kernels import Weights, norm_parts, rms_norm
from hybridmem.models.weights.checkpoint import Checkpoint
from hybridmem.models.weights.dry import with_one_more


@dataclass(frozen=True)
class RMSNorm:
    """Computes x / rms(x) * weight (Zhang & Sennrich 2019)."""

    weight_M: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x.to(self.weight_M.dtype), self.weights, self.eps)

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.weight_M)


@dataclass(frozen=True)
class RowNorm:
    """Computes an `RMSNorm` of all heads of a token together, (T, H, D)."""

    norm: RMSNorm

    def __call__(self, x_THD: Tensor) -> Tensor:
        return self.norm(x_THD.flatten(1)).view_as(x_THD)


@dataclass(frozen=True)
class GatedNorm:
    """Computes an `RMSNorm` of y * gate, separately for each of n parts of a row (Dao & Gu 2024, section 7)."""

    weights: Weights
    eps: float
    n_groups: int

    def __call__(self, y: Tensor, gate: Tensor | None) -> Tensor:
        return rms_norm(y, self.weights, self.eps, n_groups=self.n_groups, gate=gate)


class SplitNorm:
    """Splits rows into parts, and computes an `RMSNorm` of each."""

    def __init__(self, eps: float, *weights: Tensor) -> None:
        self.eps, self._sizes, self._parts = eps, tuple(len(weight) for weight in weights), weights
        self.ends = np.cumsum(self._sizes)

    @cached_property
    def weights(self) -> Weights:
        # They are joined only when they are used, because joining on "meta" imports torch._dynamo.
        with torch.enable_grad():  # The first call may be in a forward without gradients.
            return Weights(torch.cat(self._parts))

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Return the parts of x (T, E), (T, size) each."""
        return norm_parts(x, self.weights, self.eps, self._sizes, self.ends)


def load_offset_norm(checkpoint: Checkpoint, name: str, size: int, eps: float) -> RMSNorm:
    """Load a norm that multiplies by 1 + weight, as in Gemma and its relatives."""
    weight = with_one_more(checkpoint.take(f"{name}.weight", size, dtype=torch.float32))
    return RMSNorm(weight.to(checkpoint.dtype), eps)


@dataclass(frozen=True)
class LayerNorm:
    """Computes (x - mean(x)) / std(x) * weight + bias (Ba et al. 2016)."""

    weight_M: Tensor
    bias_M: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.to(self.weight_M.dtype), self.weight_M.shape, self.weight_M, self.bias_M, self.eps)
