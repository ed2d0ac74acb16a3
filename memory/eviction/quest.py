"""Defines Quest, a policy that keeps all rows and lets each query read only some pages."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.errors import SpecError
from hybridmem.memory.eviction.policy import Budget


@dataclass(frozen=True)
class Quest(Budget):
    """Keeps every row, but a query reads only the pages with the highest scores (Tang et al. 2024).

    Pages are those of `HybridMemory(page_tokens=...)`. A page's score is an upper bound on the score of its keys: the
    highest that the query could give a key between the page's least and greatest, element by element. Each key/value
    head reads pages of its own. Among the query heads that share it, the highest score of a page counts.

    A request with more than `select_up_to` new tokens reads everything, as prompts do in the paper: choosing pages for
    every token would cost more than it saves. Layers 0 and 1 are dense in the paper: `with_policy(Quest(1024),
    layers=range(2, n))`. A page takes the bytes of two more rows of keys, for these bounds.

    With a storage, quantization groups are chosen instead of pages. Rows that are not quantised yet are read by every
    query, beside the budget.

    Attributes:
        budget_tokens: number of rows that a query reads at most, in whole pages, sinks and recent rows included.
        sinks: number of first rows whose pages every query reads.
        recent: the number of rows, up to the query's own, whose pages it reads whatever their scores.
        select_up_to: pages are chosen if a request has at most this many new tokens in a step.
    """

    _: KW_ONLY
    sinks: int = 0
    recent: int = 16
    select_up_to: int = 16

    def __post_init__(self) -> None:
        self._check_counts(budget_tokens=1, sinks=0, recent=1, select_up_to=1)

    def budget_pages(self, page_tokens: int, remedy: str = "the memory smaller page_tokens") -> int:
        """Return the number of pages that a query reads at most.
        Raises SpecError, which names a `remedy`, if sinks and recent rows alone take more pages.
        """
        n_sinks, n_recent = ceil_div(self.sinks, page_tokens), ceil_div(self.recent - 1, page_tokens) + 1
        if self.budget_tokens // page_tokens < n_sinks + n_recent:
            raise SpecError(
                f"{self.label} always reads up to {n_sinks + n_recent} pages of {page_tokens} tokens, for {self.sinks} "
                f"sinks and {self.recent} recent rows; give it {(n_sinks + n_recent) * page_tokens} tokens or more, or "
                f"{remedy}"
            )
        return self.budget_tokens // page_tokens
