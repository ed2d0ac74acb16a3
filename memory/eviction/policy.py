"""Defines eviction policies: a budget of rows, and the scores and ranks by which rows are chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from hybridmem.memory.blocks.arguments import read_count
from hybridmem.memory.blocks.staging import is_apart
from hybridmem.memory.errors import SpecError
from hybridmem.memory.kernels import Scoring, reference


@dataclass(frozen=True)
class Candidates:
    """Holds the R rows, in order of position, among which a policy chooses for one attention layer of one sequence.

    The last N rows fold now. The other rows were kept at the fold before.

    Attributes:
        keys, values: (G, R, D). If values are a part of the keys, they are (G, R, value_dim); see `AttentionSpec`.
        positions: (G, R) int64. The kept rows may differ between heads.
        scores: (G, R) float32, what `EvictionPolicy.score` returned for the rows at the last fold; 0 for the last N.
        queries: (N, H, D) the queries of the rows that fold now. None unless the policy has `needs_queries`.
        scoring: how the layer computes weights, such as its scale and softcap.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor
    queries: Tensor | None
    scoring: Scoring

    @property
    def end(self) -> Tensor:
        """Return the position after the last row, as a tensor (), so that the host does not wait for the device."""
        return self.positions[0, -1] + 1

    @cached_property
    def weights(self) -> Tensor:
        """Return the attention weights (G, H / G, N, R) float32 of each query for the rows up to its own.

        The weights of a query sum over R to one minus the share of learned sinks. N is at most `EvictionPolicy.every`,
        so no matrix of all queries and all rows is ever made.
        """
        queries = self._observed
        n_shared = queries.shape[1] // len(self.keys)
        keys_HRD = self.keys.float().repeat_interleave(n_shared, dim=0)
        weights_HNR = reference.attention_weights(queries.float().transpose(0, 1), keys_HRD, self.scoring)
        return weights_HNR.view(len(self.keys), n_shared, *weights_HNR.shape[1:])

    @property
    def query_scores(self) -> Tensor:
        """Return the scores (G, H / G, N, R) float32 of each query for each row, rows at later positions included.
        They are capped if the layer has a softcap.
        """
        queries = self._observed
        q_GSND = queries.float().transpose(0, 1).view(len(self.keys), -1, *queries.shape[::2])
        scores_GSNR = q_GSND @ self.keys.float()[:, None].transpose(2, 3) * self.scoring.scale
        cap = self.scoring.softcap
        return scores_GSNR if cap is None else cap * torch.tanh(scores_GSNR / cap)

    @property
    def _observed(self) -> Tensor:
        if self.queries is None:
            raise SpecError(
                "a policy reads the weights of queries that are not remembered; give it `needs_queries: ClassVar[bool] "
                "= True`"
            )
        return self.queries

    @property
    def are_finite(self) -> bool:
        """True if keys, values, scores and queries are finite. Only then can a policy compute finite numbers."""
        given = (
            (self.keys, self.values, self.scores)
            if self.queries is None
            else (self.keys, self.values, self.scores, self.queries)
        )
        return all(bool(x.isfinite().all()) for x in given)


PolicyT = TypeVar("PolicyT", bound="Budget")


@dataclass(frozen=True)
class Budget(ABC):
    """Limits how many rows attention may keep or read. `MemorySpec.with_policy` takes it as its argument."""

    budget_tokens: int

    @classmethod
    def of_ratio(cls: type[PolicyT], ratio: float, *, max_tokens: int, **options: Any) -> PolicyT:
        """Make a policy whose budget is a share of a length: `H2O.of_ratio(0.2, max_tokens=8192)`.

        A ratio must refer to a fixed length, because the final length of a sequence is not known when its first rows
        fold, and its body has one size from the first fold on. Shorter sequences are compressed less, longer ones more.

        Args:
            ratio: how many rows stay or are read, divided by max_tokens; in (0, 1]. kvpress calls 1 - ratio the
                compression ratio.
            max_tokens: the length of the longest planned sequence.
            options: the policy's other arguments.
        Raises:
            SpecError: the ratio or the length gives no budget.
        """
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise SpecError(
                f"{cls.__name__}.of_ratio({ratio!r}): a ratio must lie in (0, 1]; for tokens write {cls.__name__}(n)"
            )
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise SpecError(
                f"max_tokens={max_tokens!r}; it must be an integer of at least 1 token: the longest sequence planned"
            )
        return cls(max(1, round(ratio * max_tokens)), **options)

    def of_layer(self, number: int, n_layers: int) -> Budget:
        """Return the policy of attention layer `number` of the `n_layers` layers that were given this policy."""
        return self

    @property
    def label(self) -> str:
        """Return the name and the budget as text: "H2O(1024)"."""
        return f"{type(self).__name__}({self.budget_tokens})"

    def _check_counts(self, **least: int) -> None:
        for name, lowest in least.items():
            value = getattr(self, name)
            if name == "budget_tokens" and isinstance(value, float) and 0 < value < 1:
                own = type(self).__name__
                raise SpecError(
                    f"{own}({value!r}) is a share; give tokens, or {own}.of_ratio({value!r}, max_tokens=...) of the "
                    "longest sequence"
                )
            read_count(f"{type(self).__name__}.{name}", value, lowest, "tokens")

    def _check_decay(self, decay: Any, within: str) -> None:
        """Raise SpecError unless `decay` lies in the interval `within`, which is "(0, 1]" or "[0, 1)"."""
        is_number = isinstance(decay, int | float) and not isinstance(decay, bool)
        if not is_number or not 0 <= decay <= 1 or decay == (0 if within[0] == "(" else 1):
            raise SpecError(f"{type(self).__name__}.decay is {decay!r}; it must lie in {within}")


@dataclass(frozen=True)
class EvictionPolicy(Budget):
    """Chooses the `budget_tokens` rows of each key/value head that stay, by scores and ranks.

    Attributes:
        budget_tokens: the number of folded rows that are kept. At most rollback_window + every newer rows are kept as
            well.
        sinks: how many of a sequence's first rows are kept whatever their rank (Xiao et al. 2023, "StreamingLLM").
        recent: how many of the newest folded rows are kept whatever their rank.
        every: the number of tokens between two folds.
        needs_queries: True if the queries of rows that have not folded yet must be stored, for `Candidates.queries`.
    """

    _: KW_ONLY
    sinks: int = 0
    recent: int = 0
    every: int = 32

    needs_queries: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check_counts(budget_tokens=1, sinks=0, recent=0, every=1)
        if not isinstance(self.needs_queries, bool):
            raise SpecError(f"{type(self).__name__}.needs_queries is {self.needs_queries!r}; it must be True or False")
        if self.sinks + self.recent > self.budget_tokens:
            raise SpecError(
                f"{type(self).__name__} protects {self.sinks} sinks and {self.recent} recent rows, more than its "
                f"budget of {self.budget_tokens} tokens; raise the budget or protect fewer"
            )

    def score(self, rows: Candidates) -> Tensor:
        """Return the scores (G, R) of the rows. The scores of kept rows are stored as float32."""
        return rows.scores

    @abstractmethod
    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        """Return the ranks (G, R). The rows with the highest ranks are kept, and of equal ranks the newest rows.

        It is called only if there are more rows than the budget. Protected rows get the rank inf, so all ranks must be
        below inf. The lowest rank is -inf.
        """

    def keep(self, rows: Candidates) -> tuple[Tensor, Tensor]:
        """Return the indices of the rows that stay, ascending, and the scores (G, R) of all rows.

        The indices are (G, n), where n is the smaller of R and budget_tokens.

        Raises:
            SpecError: `score` or `rank` gives no number for a row, although all its inputs are finite.
        """
        scores, (n_heads, n_rows) = self._numbers("score", self.score(rows), rows), rows.positions.shape
        if n_rows <= self.budget_tokens:
            return torch.arange(n_rows, device=scores.device).expand(n_heads, -1), scores
        is_protected = (rows.positions < self.sinks) | (rows.positions >= rows.end - self.recent)
        ranks = self._numbers("rank", self.rank(rows, scores), rows).masked_fill(is_protected, torch.inf)
        newest_first = ranks.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        return (n_rows - 1 - newest_first[:, : self.budget_tokens]).sort(dim=-1).values, scores

    def _numbers(self, method: str, x: Tensor, rows: Candidates) -> Tensor:
        """Check that `score` or `rank` returned one number for each row.

        On a device other than the host, the numbers themselves are not checked, because the host would have to wait.
        """
        if x is rows.scores:
            return x
        wanted = (
            f"{type(self).__name__}.{method} must give (key/value heads, rows) = {tuple(rows.positions.shape)} numbers"
        )
        if not isinstance(x, Tensor):
            raise SpecError(f"{wanted}, a tensor, and gave {x!r}")
        if x.shape != rows.positions.shape or x.is_complex() or x.device != rows.positions.device:
            raise SpecError(
                f"{wanted} on {rows.positions.device}, and gave {tuple(x.shape)} of {x.dtype} on {x.device}"
            )
        x = x if x.is_floating_point() else x.float()
        # A NaN that comes from the model is no error of the policy, and must not stop the other sequences of a step.
        if not is_apart(x.device) and not (x < torch.inf).all() and rows.are_finite:
            raise SpecError(f"{wanted} below inf, and gave NaN or inf; give -inf to what should go first")
        return x
