"""Which rows attention keeps when it may not keep them all.

The newest rows of a sequence are never touched: a rollback may want to see them. When rows are older than the rollback window
they fold, `every` tokens at a time: they join the rows that were kept before, and those that the policy ranks lowest are
forgotten. Scores change only then, from the queries of the rows that fold, so a token that is taken back leaves no trace in
them. Positions stay what they were: nothing is rotated again.

A policy is a subclass of `EvictionPolicy`, mostly of ten lines: see `docs/adding-a-policy.md`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from memory.errors import SpecError
from memory.kernels import Scoring, reference


@dataclass(frozen=True)
class Candidates:
    """Rows of one attention of one sequence that compete: R of them, by position; the last N are those that fold now.

    Attributes:
        keys, values: (G, R, D); values (G, R, value_dim) where they are a part of the keys, see `AttentionSpec`.
        positions: (G, R) int64. Which rows were kept may differ from head to head.
        scores: (G, R) float32: what `EvictionPolicy.score` said of them at the last fold; 0 for the last N.
        queries: (N, H, D) of the rows that fold, where the policy observes them.
        scoring: how the layer makes weights of them.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor
    queries: Tensor | None
    scoring: Scoring

    @property
    def end(self) -> int:
        """The position behind the last row."""
        return int(self.positions[0, -1]) + 1

    @cached_property
    def weights(self) -> Tensor:
        """(G, H / G, N, R) float32: the share of each row, up to its own, in what each query read; over R they sum to one, sinks apart.

        N is at most `EvictionPolicy.every`, so no matrix of all queries and all rows is ever made.
        """
        assert self.queries is not None, "this policy has not asked for queries"
        n_shared = self.queries.shape[1] // len(self.keys)
        keys_HRD = self.keys.float().repeat_interleave(n_shared, dim=0)
        weights_HNR = reference.attention_weights(self.queries.float().transpose(0, 1), keys_HRD, self.scoring)
        return weights_HNR.view(len(self.keys), n_shared, *weights_HNR.shape[1:])


@dataclass(frozen=True)
class EvictionPolicy(ABC):
    """How rows compete for `budget_tokens` places a head.

    Attributes:
        budget_tokens: rows that are kept of those that have folded. Newer ones come on top, at most rollback_window + every.
        sinks: the first rows of a sequence, kept whatever their rank (Xiao et al. 2023, "StreamingLLM").
        recent: of the rows that have folded, the newest that are kept whatever their rank.
        every: tokens between two folds.
        needs_queries: whether queries of rows that have not folded yet must be remembered, for `Candidates.queries`.
    """

    budget_tokens: int
    _: KW_ONLY
    sinks: int = 0
    recent: int = 0
    every: int = 32

    needs_queries: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check_counts(budget_tokens=1, sinks=0, recent=0, every=1)
        if self.sinks + self.recent > self.budget_tokens:
            raise SpecError(
                f"{type(self).__name__} protects {self.sinks} sinks and {self.recent} recent rows, more than its budget of "
                f"{self.budget_tokens} tokens; raise the budget or protect fewer"
            )

    def _check_counts(self, **least: int) -> None:
        for name, lowest in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise SpecError(f"{type(self).__name__}.{name} is {value!r}; it must be an integer of at least {lowest} tokens")

    @property
    def label(self) -> str:
        return f"{type(self).__name__}({self.budget_tokens})"

    def of_layer(self, number: int, n_layers: int) -> EvictionPolicy:
        """The policy of the attention `number` of the `n_layers` that are given this one."""
        return self

    def score(self, rows: Candidates) -> Tensor:
        """(G, R) float32, remembered with the rows that are kept."""
        return rows.scores

    @abstractmethod
    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        """(G, R): the rows with the highest ranks are kept, of equal ones the newest. Asked only when there are too many."""

    def keep(self, rows: Candidates) -> tuple[Tensor, Tensor]:
        """Indices of the rows that stay, (G, at most budget_tokens), ascending; and all scores (G, R)."""
        scores, (n_heads, n_rows) = self.score(rows), rows.positions.shape
        if n_rows <= self.budget_tokens:
            return torch.arange(n_rows, device=scores.device).expand(n_heads, -1), scores
        is_protected = (rows.positions < self.sinks) | (rows.positions >= rows.end - self.recent)
        ranks = self.rank(rows, scores).masked_fill(is_protected, torch.inf)
        newest_first = ranks.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        return (n_rows - 1 - newest_first[:, : self.budget_tokens]).sort(dim=-1).values, scores


@dataclass(frozen=True)
class Recent(EvictionPolicy):
    """The newest rows, and the first `sinks` (Xiao et al. 2023, "StreamingLLM"; positions stay absolute). sinks=0: last-recent."""

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
    """Heavy hitters (Zhang et al. 2023): rows by the weight they have received since they came, averaged over a group's heads.

    Attributes:
        decay: what a score is multiplied by for each fold, so that heavy hitters of the past make room.
    """

    _: KW_ONLY
    recent: int = 16
    decay: float = 1.0
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.decay <= 1.0:
            raise SpecError(f"H2O.decay is {self.decay!r}; it must lie in (0, 1]")

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

    def score(self, rows: Candidates) -> Tensor:
        n_new, n_rows = rows.weights.shape[2:]
        n_seen = torch.arange(n_rows - n_new + 1, n_rows + 1, device=rows.scores.device)[:, None]
        return self.decay * rows.scores + (rows.weights.mean(1) * n_seen > 1).sum(1).float()

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return scores


@dataclass(frozen=True)
class TOVA(EvictionPolicy):
    """Rows by the weight in what the last query read, averaged over all heads: each head keeps the same rows (Oren et al. 2024)."""

    needs_queries: ClassVar[bool] = True

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return rows.weights[:, :, -1].mean((0, 1)).expand(len(scores), -1)


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

    def of_layer(self, number: int, n_layers: int) -> EvictionPolicy:
        least = max(self.budget_tokens // self.steepness, self.sinks + self.recent, 1)
        most = 2 * self.budget_tokens - least
        budget = most - number * (most - least) // max(1, n_layers - 1) if n_layers > 1 else self.budget_tokens
        return replace(self, budget_tokens=budget)
