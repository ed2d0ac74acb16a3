"""Implements a bias of attention's scores by distance, which each query computes for itself.

A query has a few numbers for each head. They weight profiles over distances, which all queries and heads share
(Thinking Machines 2026, "Inkling").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory import Step
from hybridmem.memory.kernels import RowProduct
from hybridmem.models.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class DistanceBias:
    """Computes the bias of each query's scores, as `Step.attend` takes it.

    Attributes:
        profiles: the product with profiles over distances (L, R), whose last column is for all greater distances.
    """

    profiles: RowProduct

    @staticmethod
    def load(checkpoint: Checkpoint, name: str, n_profiles: int, n_distances: int) -> DistanceBias:
        """Load profiles of the nearest distances. At others there is no bias."""
        return DistanceBias.of(checkpoint.take(name, n_profiles, n_distances))

    @staticmethod
    def of(profiles_RN: Tensor) -> DistanceBias:
        """Make one from the profiles of the nearest N distances."""
        return DistanceBias(RowProduct(F.pad(profiles_RN, (0, 1)).T.contiguous()))

    def __call__(self, weights_THR: Tensor) -> Tensor:
        """Return the bias (T, H, L), float32, of queries with these weights of profiles."""
        return self.profiles(weights_THR.flatten(0, 1)).float().view(*weights_THR.shape[:2], -1)


@dataclass(frozen=True)
class LogScale:
    """Multiplies by a factor that grows with the logarithm of a token's position, after the first `n_before` tokens.

    Attributes:
        n_before: the number of tokens whose factor is 1.
        growth: by how much the factor grows for each e-fold of the position.
        n_ahead: by how much a token's position in the text is larger than in its sequence; 1 in draft heads.
    """

    n_before: float
    growth: float
    n_ahead: int = 0

    def __call__(self, x_THD: Tensor, step: Step) -> Tensor:
        factor_T11: Tensor | None = step.notes.get(self)
        if factor_T11 is None:
            reach_T = ((step.positions + 1 + self.n_ahead).float() / self.n_before).clamp(min=1.0)
            factor_T11 = step.notes[self] = (1.0 + self.growth * reach_T.log())[:, None, None]
        return (x_THD.float() * factor_T11).to(x_THD.dtype)


Scale = Callable[[Tensor, Step], Tensor]


def unscaled(x_THD: Tensor, _: Step) -> Tensor:
    """Return x: a `LogScale` of 1."""
    return x_THD
