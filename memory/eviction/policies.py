"""Defines the eviction policies of the library, each as in its paper unless its docstring says otherwise."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.errors import SpecError
from hybridmem.memory.eviction.policy import Candidates, EvictionPolicy


@dataclass(frozen=True)
class Recent(EvictionPolicy):
    """Keeps the newest rows, and the first `sinks` (Xiao et al. 2023, "StreamingLLM").
    Positions stay absolute. With sinks=0, only the newest rows are kept.
    """

    _: KW_ONLY
    sinks: int = 4

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return rows.positions.float()


@dataclass(frozen=True)
class KNorm(EvictionPolicy):
    """Keeps the rows with the shortest keys, which receive the most attention (Devoto et al. 2024)."""

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return -rows.keys.float().square().sum(-1).sqrt()


@dataclass(frozen=True)
class H2O(EvictionPolicy):
    """Keeps heavy hitters (Zhang et al. 2023): the rows that have received the most attention weight in all.

    Weights are averaged over the query heads that share a key/value head.

    Attributes:
        decay: the factor on each score at every fold. Below 1, old heavy hitters make room for newer ones.
    """

    _: KW_ONLY
    recent: int = 16
    decay: float = 1.0
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_decay(self.decay, "(0, 1]")

    def score(self, rows: Candidates) -> Tensor:
        return self.decay * rows.scores + rows.weights.mean(1).sum(1)

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return scores


@dataclass(frozen=True)
class Scissorhands(EvictionPolicy):
    """Keeps the rows that lately received more than an equal share of the weight most often (Liu et al. 2023).

    Attributes:
        decay: the factor on each count at every fold. The paper counts over a window of some hundred tokens instead.
    """

    _: KW_ONLY
    recent: int = 16
    decay: float = 0.9
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_decay(self.decay, "(0, 1]")

    def score(self, rows: Candidates) -> Tensor:
        n_new, n_rows = rows.weights.shape[2:]
        n_seen = torch.arange(n_rows - n_new + 1, n_rows + 1, device=rows.scores.device)[:, None]
        return self.decay * rows.scores + (rows.weights.mean(1) * n_seen > 1).sum(1).float()

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return scores


@dataclass(frozen=True)
class TOVA(EvictionPolicy):
    """Keeps the rows to which the last query gave the most weight (Oren et al. 2024).
    Weights are averaged over all heads, so each head keeps the same rows.
    """

    needs_queries: ClassVar[bool] = True

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return rows.weights[:, :, -1].mean((0, 1)).expand(len(scores), -1)


@dataclass(frozen=True)
class ExpectedAttention(EvictionPolicy):
    """Keeps the rows to which future queries are expected to give the most weight (Devoto et al. 2025).

    The weight is multiplied by the length of the row's value. Future queries are assumed to be normally distributed,
    with the mean mu and the covariance Sigma of the queries that fold. So the expectation for a row with key k is
    exp(z), z = scale k.mu + scale^2 / 2 k^T Sigma k, for each head. z is the mean of the row's scores plus half of
    their variance, and it is computed like this. A softmax over the rows, with the learned sinks if there are any,
    turns the expectations into shares, which are averaged over the query heads that share a key/value head. Each query
    counts for each row, even for rows at later positions, because it stands for future queries. Otherwise too few
    queries would score a row that has just folded.

    Two things differ from the paper. First, the paper reads queries before their rotation and averages the rotation of
    the next 512 positions. A memory gets queries that are rotated already, or those of a layer without rotation. So
    here future queries are assumed to be like the last ones, at the positions of the last ones. Second, the paper
    compresses once, with the queries of a whole prompt. Here each fold has only `every` queries, so the expectation for
    a row is averaged over folds.

    Attributes:
        decay: the weight of the old average at each fold, from a row's second fold on. With 0, only the last queries
            count.
    """

    _: KW_ONLY
    sinks: int = 4
    recent: int = 16
    decay: float = 0.9
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_decay(self.decay, "[0, 1)")

    def score(self, rows: Candidates) -> Tensor:
        scores_GSNR = rows.query_scores
        expected_GSR = scores_GSNR.mean(2) + scores_GSNR.var(2, correction=0) / 2
        if rows.scoring.sinks_H is not None:
            sinks_GS1 = torch.as_tensor(rows.scoring.sinks_H).view(*expected_GSR.shape[:2], 1)
            expected_GSR = torch.cat([expected_GSR, sinks_GS1], -1)
        shares_GR = expected_GSR.softmax(-1).mean(1)[:, : rows.positions.shape[1]]
        is_new = rows.positions >= rows.end - scores_GSNR.shape[2]
        return torch.where(is_new, shares_GR, self.decay * rows.scores + (1 - self.decay) * shares_GR)

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return scores * rows.values.float().square().sum(-1).sqrt()


@dataclass(frozen=True)
class SnapKV(EvictionPolicy):
    """Keeps the rows to which the last `observed` queries gave the most weight, smoothed over rows (Li et al. 2024).

    The paper compresses once, at the end of a prompt. Here each fold compresses, with the queries that fold.

    Attributes:
        kernel: the number of neighbouring rows over which a weight is averaged. It is odd.
    """

    _: KW_ONLY
    recent: int = 16
    observed: int = 32
    kernel: int = 5
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_counts(observed=1, kernel=1)
        if self.kernel % 2 == 0:
            raise SpecError(f"{type(self).__name__}.kernel is {self.kernel}; it must be odd")

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        received = rows.weights[:, :, -self.observed :].mean(1).sum(1)
        return F.avg_pool1d(received[:, None], self.kernel, stride=1, padding=self.kernel // 2)[:, 0]


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Keeps rows as SnapKV does, with larger budgets in the first layers than in the last (Cai et al. 2024).

    `budget_tokens` is the mean of all budgets.

    Attributes:
        steepness: the last layer has a budget of mean / steepness, and the first layer a budget of 2 mean - mean /
            steepness. The paper uses 20.
    """

    _: KW_ONLY
    steepness: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_counts(steepness=1)

    def of_layer(self, number: int, n_layers: int) -> EvictionPolicy:
        least = max(self.budget_tokens // self.steepness, self.sinks + self.recent, 1)
        most = 2 * self.budget_tokens - least
        budget = most - number * (most - least) // max(1, n_layers - 1) if n_layers > 1 else self.budget_tokens
        return replace(self, budget_tokens=budget)
