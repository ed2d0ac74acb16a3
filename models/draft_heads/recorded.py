"""Records steps of a draft head, and replays them for similar steps, as those of its model are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridmem.memory import Step
from hybridmem.memory.recorded import run_recorded
from hybridmem.models.draft_heads.dflash import BlankPlaces, DFlashHead
from hybridmem.models.draft_heads.interface import BlankHead, DraftHead
from hybridmem.models.draft_heads.next_token import NextTokenHead, in_order_of

_MOST_ROWS = 64
"""Steps with more rows run as ever, because Python takes little of their time."""


class RecordedHead:
    """Calls a draft head. Steps of few tokens on the CPU are replayed; see `memory.recorded.run_recorded`.

    Heads that are no `NextTokenHead`, or whose model cannot be recorded, run as ever.
    """

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self._steps = _Steps(head) if isinstance(head, NextTokenHead) and head.is_recordable else None

    def __call__(self, step: Step, rows_TM: Tensor) -> tuple[Tensor, Tensor]:
        """See `DraftHead`."""
        if self._steps is None or rows_TM.device.type != "cpu" or len(rows_TM) > _MOST_ROWS:
            return self._head(step, rows_TM)
        self._steps.give(in_order_of(step, rows_TM))
        return run_recorded(self._steps, step)


class _Steps:
    """Runs a head over rows at fixed addresses, because a replay reads where the recorded step has read."""

    def __init__(self, head: NextTokenHead) -> None:
        self._head = head
        self._given = dict[int, Tensor]()

    def give(self, rows_TM: Tensor) -> None:
        """Set the rows of the next step, in the step's own order."""
        given = self._given.get(len(rows_TM))
        if given is None:
            given = self._given[len(rows_TM)] = torch.empty_like(rows_TM, memory_format=torch.contiguous_format)
        given.copy_(rows_TM)

    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        return self._head.in_step_order(step, self._given[len(step.token_ids)])


class RecordedBlankHead:
    """Calls a head that fills blanks. Steps in which all requests have blanks are replayed as those of other heads.

    Heads that are no `DFlashHead`, or whose model cannot be recorded, run as ever.
    """

    def __init__(self, head: BlankHead) -> None:
        self._head = head
        self._steps = _BlankSteps(head) if isinstance(head, DFlashHead) and head.is_recordable else None

    def __call__(self, step: Step, rows_PM: Tensor, n_pairs: Sequence[int]) -> Tensor:
        """See `BlankHead`."""
        n_tokens, n_blanks = len(step.token_ids), len(n_pairs) * self._head.n_fed
        if (
            self._steps is None
            or rows_PM.device.type != "cpu"
            or n_tokens > _MOST_ROWS
            or n_tokens - sum(n_pairs) != n_blanks
        ):
            return self._head(step, rows_PM, n_pairs)
        self._steps.give(rows_PM, self._steps.head.places(step, n_pairs))
        return run_recorded(self._steps, step, most_tokens=_MOST_ROWS)


class _BlankSteps:
    """Runs a head that fills blanks over rows and places at fixed addresses, as `_Steps` does."""

    def __init__(self, head: DFlashHead) -> None:
        self.head = head
        self._given = dict[tuple[int, int], tuple[Tensor, BlankPlaces]]()

    def give(self, rows_PM: Tensor, places: BlankPlaces) -> None:
        """Set the rows and places of the next step. Steps of one layout have as many pairs and blanks."""
        key = self._key = len(rows_PM), len(places.queries_R)
        given = self._given.get(key)
        if given is None:
            unseen = {is_causal: unseen_TL.clone() for is_causal, unseen_TL in places.unseen.items()}
            own = BlankPlaces(places.rows_X.clone(), places.queries_R.clone(), unseen)
            self._given[key] = rows_PM.clone(memory_format=torch.contiguous_format), own
            return
        given[0].copy_(rows_PM)
        given[1].rows_X.copy_(places.rows_X)
        given[1].queries_R.copy_(places.queries_R)
        for is_causal, unseen_TL in places.unseen.items():
            given[1].unseen[is_causal].copy_(unseen_TL)

    def __call__(self, step: Step) -> Tensor:
        return self.head.at(step, *self._given[self._key])
