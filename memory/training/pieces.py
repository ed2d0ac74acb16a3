"""Keeps what later chunks read of earlier ones: rows of attention and states, and the gradients of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from hybridmem.memory.specs import AttentionSpec, RecurrentSpec
from hybridmem.memory.training.attention import Rows
from hybridmem.memory.training.boundaries import Boundaries, Held

Place = tuple[int, str]
"""The layer and the name of one of its memories."""


class Chunk(Protocol):
    """Declares what a piece asks of the chunk in which it was computed."""

    def compute_states(self) -> None: ...
    def parents(self) -> list[Piece | None]: ...


class Piece:
    """Holds consecutive tokens of one sequence that were computed in one step. Pieces are a tree, by their parents.

    Attributes:
        parent: the piece before this one; None at the beginning of a sequence.
        start: the position of its first token.
        rows: for each attention, what later tokens read: keys and values (n, G, D); keys alone if values are parts of
            them, or if they are keys of an index.
        states: for each recurrence, the states after the last token, as in its spec. They may have been left out.
        row_grads, state_grads: the sums of the gradients that later pieces have found of these.
        chunk: the chunk in which it was computed.
    """

    def __init__(self, parent: Piece | None, tokens: Tensor, boundaries: Boundaries) -> None:
        self.parent, self.tokens = parent, tokens
        self.start: int = 0 if parent is None else parent.end
        self.rows: dict[Place, tuple[Tensor, ...]] = {}
        self.states: dict[Place, list[Tensor]] = {}
        self.row_grads: dict[Place, tuple[Tensor, ...]] = {}
        self.state_grads: dict[Place, list[Tensor]] = {}
        self.chunk: Chunk | None = None
        self._boundaries = boundaries
        self._of_rows, self._of_states = Held(boundaries, self), Held(boundaries, self)

    @property
    def end(self) -> int:
        """Return the position after the last token."""
        return self.start + len(self.tokens)

    def path(self, since: int = 0) -> Iterator[Piece]:
        """Return this piece and those before it, newest first, as far as they have a token at `since` or later."""
        piece: Piece | None = self
        while piece is not None and piece.end > since:
            yield piece
            piece = piece.parent

    def keep_rows(self, place: Place, rows: tuple[Tensor, ...]) -> None:
        """Keep rows for later chunks. Raises CapacityError."""
        self.rows[place] = tuple(self._boundaries.keep(x, self._of_rows) for x in rows)

    def keep_states(self, states: dict[Place, list[Tensor]]) -> None:
        """Keep the states after the last token for later chunks. Raises CapacityError."""
        flat = [tensor for tensors in states.values() for tensor in tensors]
        kept = iter(self._boundaries.keep_states(self, flat, self._of_states) if flat else ())
        self.states = {place: [next(kept) for _ in tensors] for place, tensors in states.items()}

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the states that it has now."""
        return sum(tensor.nbytes for tensors in self.states.values() for tensor in tensors)

    def drop_states(self) -> None:
        """Leave the states out. `restore` computes them again."""
        self.states = {}
        self._of_states.release()
        self._of_states = Held(self._boundaries, self)

    def restore(self, place: Place) -> list[Tensor]:
        """Return the states of a recurrence. If they were left out, chunks are computed again, the oldest first."""
        todo, waiting = list[Chunk](), [self]
        while waiting:
            piece = waiting.pop()
            if piece.states or piece.chunk is None or piece.chunk in todo:
                continue
            todo.append(piece.chunk)
            waiting += [parent for parent in piece.chunk.parents() if parent is not None]
        for chunk in reversed(todo):
            chunk.compute_states()
            self._boundaries.n_computed_again += 1
        return self.states[place]

    def own_row_grads(self, place: Place) -> tuple[Tensor, ...]:
        """Return the gradients of rows, which are zero at first. They are float32, because they are sums of many."""
        if place not in self.row_grads:
            self.row_grads[place] = tuple(
                self._boundaries.zeros_like(x, torch.float32, self._of_rows) for x in self.rows[place]
            )
        return self.row_grads[place]

    def own_state_grads(self, place: Place, like: list[Tensor]) -> list[Tensor]:
        """Return the gradients of states, which are zero at first."""
        if place not in self.state_grads:
            self.state_grads[place] = [torch.zeros_like(x) for x in like]
        return self.state_grads[place]

    def release(self) -> None:
        """Forget rows, states and gradients, which nothing reads after this piece's own backward."""
        for kept in (self.rows, self.states, self.row_grads, self.state_grads):
            kept.clear()
        self._of_rows.release()
        self._of_states.release()
        self.chunk = None


class Before:
    """Gives the pieces of a step what was before them, and takes back the gradients of that.

    Args:
        parents: for each piece of the step, the piece before it.
        wants_gradients: False for a forward alone.
    """

    def __init__(self, parents: list[Piece | None], *, wants_gradients: bool) -> None:
        self._parents, self._wants_gradients = parents, wants_gradients
        self._leaves: dict[Place, list[Tensor]] = {}

    def rows(self, i: int, place: Place, spec: AttentionSpec) -> list[Rows]:
        """Return the rows before piece i of the step that its tokens may see, oldest first."""
        parent = self._parents[i]
        if parent is None:
            return []
        since = 0 if spec.window is None else max(0, parent.end - spec.window + 1)
        found = []
        for piece in parent.path(since):
            (k, v), dk, dv = _keys_and_values(piece.rows[place], spec), None, None
            if self._wants_gradients:
                dk, dv = _keys_and_values(piece.own_row_grads(place), spec)
            found.append(Rows(k, v, dk, dv).cut(max(0, since - piece.start), len(piece.tokens)))
        return found[::-1]

    def index_keys(self, i: int, place: Place, device: torch.device) -> list[Tensor]:
        """Return the keys of an index before piece i of the step, oldest first."""
        parent = self._parents[i]
        return [] if parent is None else [piece.rows[place][0].to(device) for piece in parent.path()][::-1]

    def states(self, place: Place, spec: RecurrentSpec, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Return the states before all pieces of the step, (S, *shape) for each state of a recurrence."""
        found = [None if parent is None else parent.restore(place) for parent in self._parents]
        leaves = []
        for j, state in enumerate(spec.states):
            first = torch.full(state.shape, state.initial, dtype=state.dtype or dtype, device=device)
            parts = [first if own is None else own[j].to(device) for own in found]
            leaves.append(torch.stack(parts).requires_grad_(self._wants_gradients))
        self._leaves[place] = leaves
        return leaves

    def hand_back(self) -> None:
        """Add the gradients of states to the pieces that they are of. Those of rows are there already."""
        for place, leaves in self._leaves.items():
            for i, parent in enumerate(self._parents):
                if parent is not None and any(leaf.grad is not None for leaf in leaves):
                    totals = parent.own_state_grads(place, [leaf[i] for leaf in leaves])
                    for total, leaf in zip(totals, leaves, strict=True):
                        if leaf.grad is not None:
                            total.add_(leaf.grad[i])


def _keys_and_values(parts: tuple[Tensor, ...], spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return keys and values, of rows or of their gradients."""
    return parts[0], parts[1] if spec.value_dim is None else parts[0][..., : spec.value_dim]
