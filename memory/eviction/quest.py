"""A policy that forgets nothing and reads little."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from memory.blocks.arrays import ceil_div
from memory.errors import SpecError
from memory.eviction.policy import Budget


@dataclass(frozen=True)
class Quest(Budget):
    """Every row is kept; a query reads the pages, of `HybridMemory(page_tokens=...)`, that may matter to it (Tang et
    al. 2024).

    A page's score is the most that a query could score a key between the least and the greatest of the page's, element
    by element. Each key/value head reads pages of its own; of the query heads that share it, the one that scores a page
    highest decides.

    A request with more than `select_up_to` new tokens reads everything, as prompts do in the paper: choosing pages for
    every token would cost more than it saves. Layers 0 and 1 are dense in the paper: `with_policy(Quest(1024),
    layers=range(2, n))`. A page takes two more rows of keys.

    With a storage, what is chosen is a group of rows that it keeps together. The exact rows are read by every query,
    beside the budget.

    Attributes:
        budget_tokens: rows that a query reads at most, in whole pages; sinks and recent rows are among them.
        sinks: the first rows, whose pages every query reads.
        recent: the rows up to the query, itself included, whose pages it reads whatever they score.
        select_up_to: new tokens of a request in one step.
    """

    _: KW_ONLY
    sinks: int = 0
    recent: int = 16
    select_up_to: int = 16

    def __post_init__(self) -> None:
        self._check_counts(budget_tokens=1, sinks=0, recent=1, select_up_to=1)

    def budget_pages(self, page_tokens: int, remedy: str = "the memory smaller page_tokens") -> int:
        """Pages that a query reads at most.
        Raises SpecError, with another `remedy`, if those that it always reads are more.
        """
        n_sinks, n_recent = ceil_div(self.sinks, page_tokens), ceil_div(self.recent - 1, page_tokens) + 1
        if self.budget_tokens // page_tokens < n_sinks + n_recent:
            raise SpecError(
                f"{self.label} always reads up to {n_sinks + n_recent} pages of {page_tokens} tokens, for {self.sinks} "
                f"sinks and {self.recent} recent rows; give it {(n_sinks + n_recent) * page_tokens} tokens or more, or "
                f"{remedy}"
            )
        return self.budget_tokens // page_tokens
