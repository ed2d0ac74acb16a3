"""Computes one chunk: forward without keeping activations, and backward from the rows and states before it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridmem.memory.kernels.double_precision import precision_for
from hybridmem.memory.specs import MemorySpec
from hybridmem.memory.training.pieces import Before, Piece, gone_through
from hybridmem.memory.training.step import TrainingStep

Head = Callable[[Tensor, Tensor], Tensor]
"""Makes values (n, ...) of logits (n, vocabulary) and the ids (n,) of the tokens that came next."""


def logprobs_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the logarithm of each next token's probability, (n,) float32, or float64 for such logits."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def no_values(logits: Tensor, targets: Tensor) -> Tensor:
    """Return zeros. If this is the head, the model computes no logits for it."""
    return logits.new_zeros(len(targets))


class Chunk:
    """Holds the pieces of texts that one step computes.

    Args:
        spec: the model's spec, in which each layer has its own policy.
        value_rows, targets: for each piece, the rows whose logits `head` gets, and the tokens that come after them.
        has_end: for each piece, whether the logits of its last row are wanted.
    """

    def __init__(
        self, model: Any, spec: MemorySpec, pieces: list[Piece], value_rows: list[range], targets: list[Tensor],
        has_end: list[bool], head: Head, rollback_window: int,
    ) -> None:  # fmt: skip
        self._model, self._spec, self._head, self._pieces, self.device = model, spec, head, pieces, spec.device
        # Models run without gradients: what they compute is below this decorator.
        self._forward = inspect.unwrap(type(model).__call__)
        self._targets, self._rollback_window = torch.cat(targets), rollback_window
        values, ends, first = list[int](), list[int](), 0
        for piece, rows, is_wanted in zip(pieces, value_rows, has_end, strict=True):
            values += [first + row for row in rows]
            first += len(piece.tokens)
            ends += [first - 1] if is_wanted else []
        self._n_values, self._n_ends = len(values), len(ends)
        # Norms cannot take zero rows, so at least one row is selected.
        self._select = torch.tensor([*values, *ends] or [first - 1], device=self.device)
        self._is_released = False
        for piece in pieces:
            piece.chunk = self

    def forward(self) -> tuple[Tensor, Tensor]:
        """Compute the values, and the logits of last rows. The pieces keep what later chunks read."""
        step, values, last_logits = self._run(self._before(wants_gradients=False))
        for place, rows in step.rows.items():
            for piece, *own in zip(self._pieces, *map(step.segments.split, rows), strict=True):
                piece.keep_rows(place, tuple(own))
        for place, choices in step.choices.items():
            for piece, choice in zip(self._pieces, choices, strict=True):
                piece.keep_choice(place, *choice)
        for i, piece in enumerate(self._pieces):
            piece.keep_states({place: [x[i] for x in states] for place, states in step.states.items()})
        return values, last_logits

    def parents(self) -> list[Piece | None]:
        """Return, for each piece, the one before it."""
        return [piece.parent for piece in self._pieces]

    def _before(self, *, wants_gradients: bool) -> Before:
        return Before(self.parents(), self.device, wants_gradients=wants_gradients)

    def compute_states(self) -> None:
        """Compute again the states that were left out. They are kept until the pieces' own backward."""
        with torch.no_grad():
            step, *_ = self._run(self._before(wants_gradients=False))
        for i, piece in enumerate(self._pieces):
            piece.states = {place: [x[i].clone() for x in states] for place, states in step.states.items()}

    def backward(self, dvalues: Tensor | None, dlast_logits: Tensor | None) -> None:
        """Compute the chunk again. Add gradients to weights, and to the rows and states before the chunk."""
        if self._is_released:
            raise gone_through()
        self._is_released = True
        before = self._before(wants_gradients=True)
        with torch.enable_grad():
            step, values, last_logits = self._run(before)
        found = [(values, dvalues), (last_logits, dlast_logits), *self._later(step)]
        wanted = [(out, grad.to(out.dtype)) for out, grad in found if grad is not None and out.requires_grad]
        if wanted:
            # All chunks share the graph that makes weights from parameters, so it is retained.
            outputs, gradients = zip(*wanted, strict=True)
            torch.autograd.backward(outputs, gradients, retain_graph=True)
            before.hand_back()
        for piece in self._pieces:
            piece.release()

    def _run(self, before: Before) -> tuple[TrainingStep, Tensor, Tensor]:
        step = TrainingStep(self._spec, self._pieces, before, self._select, self._rollback_window)
        with precision_for(step.spec.dtype):
            logits = self._forward(self._model, step)
        values = self._head(logits[: self._n_values], self._targets)
        # A view would keep the logits of the whole chunk in memory.
        return step, values, logits[self._n_values : self._n_values + self._n_ends].clone()

    def _later(self, step: TrainingStep) -> list[tuple[Tensor, Tensor]]:
        """Return rows and states of this chunk, each with the gradients that later chunks have found."""
        found = []
        for place, rows in step.rows.items():
            if any(place in piece.row_grads for piece in self._pieces):
                grads = zip(*(piece.own_row_grads(place) for piece in self._pieces), strict=True)
                found += [
                    (x, torch.cat([part.to(self.device) for part in parts]))
                    for x, parts in zip(rows, grads, strict=True)
                ]
        for place, states in step.states.items():
            if any(place in piece.state_grads for piece in self._pieces):
                totals = (piece.own_state_grads(place, [x[i] for x in states]) for i, piece in enumerate(self._pieces))
                grads = zip(*totals, strict=True)
                found += [(x, torch.stack(parts)) for x, parts in zip(states, grads, strict=True)]
        return found


class Record(torch.autograd.Function):
    """Records a chunk for autograd. Its inputs are the chunks before it, so that their backward runs after its own.

    Outputs are a number that stands for the chunk, the values, and the logits of last rows.
    """

    @staticmethod
    def forward(ctx: Any, chunk: Chunk, *dones: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return torch.zeros_like(dones[0]), *chunk.forward()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, dvalues, dlast_logits = grads
        ctx.chunk.backward(dvalues, dlast_logits)
        # Nobody reads these gradients. Without any, autograd would not go on to the chunks before.
        zero = torch.zeros((), device=ctx.chunk.device)
        return None, *[zero] * (len(ctx.needs_input_grad) - 1)
