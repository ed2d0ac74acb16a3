"""Computes which pages a sequence holds, from positions alone, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s, ceil_div
from hybridmem.memory.errors import DropError
from hybridmem.memory.interface import Dropped, Stretch
from hybridmem.memory.sequences.folding import FoldPoints


@dataclass(frozen=True)
class PageGrid:
    """Says how rows are divided into pages, and which pages a sequence holds.

    Attributes:
        page_tokens: how many rows a page has.
        window: how many rows a token sees, itself included. None: it sees all.
        rollback_window: how many tokens can always be taken back, counted from the peak.
    """

    page_tokens: int
    window: int | None
    rollback_window: int

    def pages(self, positions: Int64s) -> Int64s:
        """Return the number of pages that rows [0, position) fill, the last one perhaps in part."""
        return ceil_div(positions, self.page_tokens)

    def held_pages(self, stretch: Stretch) -> Int64s:
        """Return (4, N) numbers of pages: held before, in and after a step, and full pages that are never freed.

        Pages that leave the window are released after the step.
        """
        before, after = (self.first_page(peaks) for peaks in (stretch.peaks, np.maximum(stretch.peaks, stretch.ends)))
        wanted, stays = self.pages(stretch.ends), stretch.starts // self.page_tokens * (not self.leaves)
        return np.stack([self.pages(stretch.starts) - before, wanted - before, wanted - after, stays])

    @property
    def leaves(self) -> bool:
        """True if pages that leave the window are released."""
        return self.window is not None

    def first_page(self, peaks: Int64s) -> Int64s:
        """Return the number of the oldest page that sequences with these peaks hold.

        It depends only on the peak, as the position of a body does.
        """
        if self.window is None:
            return np.zeros_like(peaks)
        return FoldPoints(self.rollback_window + self.window - 1, self.page_tokens).count(peaks)

    def oldest_wanted(self, peaks: Int64s) -> Int64s:
        """Return the oldest row that sequences with these peaks may need after any rollback in the rollback window."""
        return np.maximum(0, peaks - self.rollback_window - (self.window or 0) + 1)

    def horizon(self, oldest: Int64s) -> Int64s:
        """Return the earliest position whose window has no row older than `oldest`."""
        return np.where(oldest > 0, oldest + (self.window or 1) - 1, 0)

    def after_drop(self, dropped: Dropped, oldest: int) -> tuple[int, int, int, int]:
        """Return the first page and the oldest row after a drop, and how many pages stay and how many are new.

        The sequence holds rows from `oldest` on. Raises DropError if tokens would then see rows that have left the
        window.
        """
        first_page, oldest = self._first_after_drop(dropped, oldest)
        n_kept = max(0, dropped.start // self.page_tokens - first_page)
        n_pages = ceil_div(dropped.length - dropped.n_tokens, self.page_tokens) - first_page
        return first_page, oldest, n_kept, n_pages - n_kept

    def _first_after_drop(self, dropped: Dropped, oldest: int) -> tuple[int, int]:
        """Return the first page and the oldest row after a drop. Raises DropError."""
        if self.window is None:
            return 0, 0
        n = dropped.n_tokens
        wanted_before, wanted = self.oldest_wanted(np.array([dropped.peak, dropped.peak - n])).tolist()
        first = wanted // self.page_tokens
        held = oldest if oldest < dropped.start else max(oldest, dropped.end) - n
        if held > wanted or int(self.horizon(np.array(max(held, first * self.page_tokens)))) > dropped.length - n:
            most = wanted_before - min(oldest, dropped.start)
            remedy = f"drop at most {most} tokens there" if 0 < most < n else "feed what is to stay to a new sequence"
            raise DropError(
                f"without tokens [{dropped.start}, {dropped.end}) a window of {self.window} tokens would reach back to "
                f"rows before {oldest}, which have left it; {remedy}",
                start=dropped.start, end=dropped.end,
            )  # fmt: skip
        return first, held


@dataclass(frozen=True)
class DropPlan:
    """Says what a slot's page table will be after tokens are dropped.

    Attributes:
        first_page, oldest: the number of the table's first page, and the oldest row that is held.
        n_kept: how many of the present pages stay, counted from the first page.
        fresh: the new pages after those.
    """

    slot: int
    first_page: int
    oldest: int
    n_kept: int
    fresh: Int64s
