"""Holds hidden states of the model between its step and the draft head that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import Step
from hybridmem.memory.recorded import run_recorded
from hybridmem.models.draft_heads import HiddenRows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class HeldRows:
    """Holds rows of a sequence's newest positions, (R,) each, from position `start` up to `end`."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self._parts: list[Tensor] = []

    def add(self, start: int, rows_NR: Tensor) -> None:
        """Hold the rows of positions from `start` on. Rows of these and later positions are replaced.

        If positions between are missing, earlier rows are dropped.
        """
        if not self.start <= start <= self.end:
            self.start, self._parts = start, []
        elif start < self.end:
            kept = self.until(start)
            self._parts = kept._parts
        self.end = start + len(rows_NR)
        self._parts.append(rows_NR)

    def until(self, end: int) -> HeldRows:
        """Return the rows of positions before `end`."""
        kept = HeldRows(self.start)
        kept.end = end
        if end > self.start:
            kept._parts = [self.between(self.start, end)]
        return kept

    def between(self, start: int, end: int) -> Tensor:
        """Return the rows of positions start ... end - 1, (n, R)."""
        found, at = [], self.start
        for part in self._parts:
            first, last = max(start - at, 0), min(end - at, len(part))
            if first < last:
                found.append(part[first:last])
            at += len(part)
        return found[0] if len(found) == 1 else torch.cat(found)

    def keep_from(self, start: int) -> None:
        """Drop the rows of positions before `start`."""
        if self.start < start < self.end:
            self._parts = [self.between(start, self.end).clone()]
            self.start = start


class Watched:
    """Runs the engine's model, and shows each step's hidden states. Logits have the bits that the model gives.

    Args:
        show: called in each open step with the rows of all its tokens, (T, R), in the caller's order.
        is_watched: returns whether the hidden states of a step are wanted. If not, the model runs as ever.
    """

    def __init__(
        self, hidden_rows: HiddenRows, show: Callable[[Step, Tensor], None], is_watched: Callable[[], bool]
    ) -> None:
        self._hidden_rows, self._show, self._is_watched = hidden_rows, show, is_watched
        self.config: PreTrainedConfig = hidden_rows.model.config
        self.memory_spec = hidden_rows.memory_spec

    def __call__(self, step: Step) -> Tensor:
        if not self._is_watched():
            model = self._hidden_rows.model
            return run_recorded(model, step) if model.is_recordable else model(step)
        logits, rows_TR = run_recorded(self._hidden_rows, step)
        self._show(step, step.select(rows_TR, "all"))
        return logits
