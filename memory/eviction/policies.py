"""The policies that come with the library, each as its paper has it unless its docstring says otherwise."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from memory.errors import SpecError
from memory.eviction.policy import Candidates, EvictionPolicy


@dataclass(frozen=True)
class Recent(EvictionPolicy):
    """The newest rows, and the first `sinks` (Xiao et al. 2023, "StreamingLLM"; positions stay absolute). sinks=0:
    last-recent.
    """

    _: KW_ONLY
    sinks: int = 4

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return rows.positions.float()


@dataclass(frozen=True)
class KNorm(EvictionPolicy):
    """Rows with short keys (Devoto et al. 2024): they are the ones that much attention goes to."""

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return -rows.keys.float().square().sum(-1).sqrt()


@dataclass(frozen=True)
class H2O(EvictionPolicy):
    """Heavy hitters (Zhang et al. 2023): rows by the weight they have received since they came, averaged over a group's
    heads.

    Attributes:
        decay: what a score is multiplied by for each fold, so that heavy hitters of the past make room.
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
    """Rows by how often they received more than an equal share, in the last folds (Liu et al. 2023).

    Attributes:
        decay: what a count is multiplied by for each fold; the paper counts over a window of some hundred tokens.
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
    """Rows by the weight in what the last query read, averaged over all heads: each head keeps the same rows (Oren et
    al. 2024).
    """

    needs_queries: ClassVar[bool] = True

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return rows.weights[:, :, -1].mean((0, 1)).expand(len(scores), -1)


@dataclass(frozen=True)
class ExpectedAttention(EvictionPolicy):
    """Rows by the weight that queries to come are expected to pay them, times the length of their values (Devoto et al.
    2025).

    Queries to come are taken for normal, with the mean mu and the covariance Sigma of those that fold, so a row with
    key k expects exp(z), z = scale k.mu + scale^2 / 2 k^T Sigma k, of each head: mean plus half the variance of its
    scores, which is how it is computed here. A softmax over the rows makes shares of it, learned sinks taking theirs,
    and they are averaged over a group's heads. Each query counts for each row, also for those behind it: it stands for
    others to come, and a row that has just folded needs judges.

    Two things differ from the paper. It knows queries before their rotation and averages the rotation of the next 512
    positions; a memory sees them rotated already, or never, so here those to come are as those just seen, where those
    just stood. And it compresses once, with a whole prompt's queries; here each fold has only `every`, so what a row
    expects is averaged over folds.

    Attributes:
        decay: how much of that average stays at each fold, from the row's own first one on; 0 for what the last queries
            say alone.
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
    """Rows by the weight in what the last `observed` queries read, each smoothed over its neighbours (Li et al. 2024).

    The paper compresses once, at the end of a prompt; here each fold does, with the queries that fold.

    Attributes:
        kernel: rows that a weight is averaged over; odd.
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
    """SnapKV with larger budgets in the first layers than in the last; `budget_tokens` is their mean (Cai et al. 2024).

    Attributes:
        steepness: the last layer has mean / steepness, the first 2 mean less that. The paper: 20.
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
