"""Which pages a sequence keeps: positions only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memory.blocks.arrays import Int64s, ceil_div
from memory.errors import DropError
from memory.interface import Dropped, Stretch
from memory.sequences.folding import FoldPoints


@dataclass(frozen=True)
class PageGrid:
    """How rows are cut into pages, and which pages a sequence keeps.

    Attributes:
        page_tokens: rows a page.
        window: rows that a token sees, itself included; None for all.
        rollback_window: tokens that can always be taken back, counted from the furthest position reached.
    """

    page_tokens: int
    window: int | None
    rollback_window: int

    def pages(self, positions: Int64s) -> Int64s:
        """Count the pages that rows [0, position) take."""
        return ceil_div(positions, self.page_tokens)

    def held_pages(self, stretch: Stretch) -> Int64s:
        """(4, N) pages that sequences hold before, in and after a step: old ones leave when it is over.
        And full ones that never leave.
        """
        before, after = (self.first_page(peaks) for peaks in (stretch.peaks, np.maximum(stretch.peaks, stretch.ends)))
        wanted, stays = self.pages(stretch.ends), stretch.starts // self.page_tokens * (not self.leaves)
        return np.stack([self.pages(stretch.starts) - before, wanted - before, wanted - after, stays])

    @property
    def leaves(self) -> bool:
        """Whether a sequence gives up old pages."""
        return self.window is not None

    def first_page(self, peaks: Int64s) -> Int64s:
        """The oldest page that a sequence keeps that has reached `peaks`.
        It depends on nothing else, as a body's position does.
        """
        if self.window is None:
            return np.zeros_like(peaks)
        return FoldPoints(self.rollback_window + self.window - 1, self.page_tokens).count(peaks)

    def oldest_wanted(self, peaks: Int64s) -> Int64s:
        """The oldest row that a token sees to which a sequence may be taken back that has reached `peaks`."""
        return np.maximum(0, peaks - self.rollback_window - (self.window or 0) + 1)

    def horizon(self, oldest: Int64s) -> Int64s:
        """The earliest position whose window lies in rows [oldest, ...)."""
        return np.where(oldest > 0, oldest + (self.window or 1) - 1, 0)

    def after_drop(self, dropped: Dropped, oldest: int) -> tuple[int, int]:
        """The first page and the oldest row, at its new position, of a sequence that holds rows from `oldest` on and
        drops tokens.

        Raises DropError: then tokens would see rows that have left the window.
        """
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
    """What a slot's table of pages will be once tokens are dropped.

    Attributes:
        first_page, oldest: the page it begins with, and the oldest row that is there.
        n_kept: of the pages that it has now, those that stay, from the first on.
        fresh: those that follow.
    """

    slot: int
    first_page: int
    oldest: int
    n_kept: int
    fresh: Int64s
