"""Defines Quest, a policy that keeps all rows and lets each query read only some pages."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.errors import SpecError
from hybridmem.memory.eviction.policy import Budget


@dataclass(frozen=True)
class Quest(Budget):
    """Keeps every row, but a query reads only the pages with the highest scores (Tang et al. 2024).

    Pages are those of `HybridMemory(page_tokens=...)`. A page's score is an upper bound on the scores of its keys: the
    highest score that the query could give to a key between the page's least and greatest key, element by element. Each
    key/value head reads its own choice of pages. For the query heads that share it, a page's highest score counts.

    A request with more than `select_up_to` new tokens reads everything, as prompts do in the paper, because choosing
    pages for every token would cost more than it saves. Layers 0 and 1 are dense in the paper:
    `with_policy(Quest(1024), layers=range(2, n))`. The bounds of a page take as many bytes as two more rows of keys.

    With a storage, quantization groups are chosen instead of pages. Every query also reads all rows that are not
    quantized yet, in addition to the budget.

    Attributes:
        budget_tokens: how many rows a query reads at most, in whole pages, sinks and recent rows included.
        sinks: how many of the first rows every query reads, with the other rows of their pages.
        recent: how many of the newest rows, its own included, a query reads whatever their scores, with the other rows
            of their pages.
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
        Raises SpecError, which names a `remedy`, if sinks and recent rows alone take more pages than that.
        """
        n_sinks, n_recent = ceil_div(self.sinks, page_tokens), ceil_div(self.recent - 1, page_tokens) + 1
        if self.budget_tokens // page_tokens < n_sinks + n_recent:
            raise SpecError(
                f"{self.label} always reads up to {n_sinks + n_recent} pages of {page_tokens} tokens, for {self.sinks} "
                f"sinks and {self.recent} recent rows; give it {(n_sinks + n_recent) * page_tokens} tokens or more, or "
                f"{remedy}"
            )
        return self.budget_tokens // page_tokens
