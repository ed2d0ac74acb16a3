"""Records steps of a draft head, and replays them for similar steps, as those of its model are."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridmem.memory import Step
from hybridmem.memory.recorded import run_recorded
from hybridmem.models.draft_heads.interface import DraftHead
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
        found_SX = run_recorded(self._steps, step)
        n_model = rows_TM.shape[1]
        return found_SX[:, :-n_model], found_SX[:, -n_model:]


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

    def __call__(self, step: Step) -> Tensor:
        """Return logits and rows beside each other, (n, vocab + M)."""
        return torch.cat(self._head.in_step_order(step, self._given[len(step.token_ids)]), -1)
