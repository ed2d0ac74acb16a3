"""Keeps what later chunks read of earlier ones: rows of attention and states, and the gradients of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybridmem.memory.errors import StepError
from hybridmem.memory.specs import AttentionSpec, RecurrentSpec
from hybridmem.memory.training.attention import Rows
from hybridmem.memory.training.boundaries import Boundaries, Held
from hybridmem.memory.training.kept import Kept

Place = tuple[int, str]
"""The layer and the name of one of its memories."""


class Chunk(Protocol):
    """Declares what a piece calls of the chunk in which it was computed."""

    def compute_states(self) -> None: ...
    def parents(self) -> list[Piece | None]: ...


def gone_through() -> StepError:
    """Return the error of who needs tokens through which a backward went: what it needed of them is gone."""
    return StepError(
        "a backward has gone through these tokens of the tape already; sum up all losses before the one backward, or "
        "record a new tape"
    )


class Piece:
    """Holds consecutive tokens of one sequence that were computed in one step. Pieces are a tree, by their parents.

    Attributes:
        parent: the piece before this one; None at the beginning of a sequence.
        start: the position of its first token.
        rows: for each attention, what later tokens read: keys and values (n, G, D); keys alone if values are parts of
            them, or if they are keys of an index.
        states: for each recurrence, the states after the last token, as in its spec. They may have been left out.
        queries: for each attention whose policy observes queries, those of the newest rows, (n, H, D).
        kept: for each attention with a policy, which rows are kept after the last token.
        row_grads, state_grads: the sums of the gradients that later pieces have found of these.
        chunk: the chunk in which it was computed.
        oldest: the first piece of its sequence.
        is_released: whether a backward went through it. It then went through all pieces before it too.
    """

    def __init__(self, parent: Piece | None, tokens: Tensor, boundaries: Boundaries) -> None:
        self.parent, self.tokens = parent, tokens
        self.start: int = 0 if parent is None else parent.end
        self.rows: dict[Place, tuple[Tensor, ...]] = {}
        self.states: dict[Place, list[Tensor]] = {}
        self.queries: dict[Place, Tensor] = {}
        self.kept: dict[Place, Kept] = {}
        self.row_grads: dict[Place, tuple[Tensor, ...]] = {}
        self.state_grads: dict[Place, list[Tensor]] = {}
        self.chunk: Chunk | None = None
        self.oldest: Piece = self if parent is None else parent.oldest
        self.is_released = False
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

    def keep_choice(self, place: Place, kept: Kept, queries: Tensor | None) -> None:
        """Keep what a policy has chosen, and the queries that it observes next. Raises CapacityError."""
        positions, scores = (self._boundaries.keep(x, self._of_rows) for x in kept[1:])
        self.kept[place] = Kept(kept.at, positions, scores)
        if queries is not None:
            self.queries[place] = self._boundaries.keep(queries, self._of_rows)

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
        """Return the gradients of rows, zero at first. They are at least float32, because many numbers are summed."""
        if place not in self.row_grads:
            self.row_grads[place] = tuple(
                self._boundaries.zeros_like(x, torch.promote_types(x.dtype, torch.float32), self._of_rows)
                for x in self.rows[place]
            )
        return self.row_grads[place]

    def own_state_grads(self, place: Place, like: list[Tensor]) -> list[Tensor]:
        """Return the gradients of states, which are zero at first."""
        if place not in self.state_grads:
            self.state_grads[place] = [torch.zeros_like(x) for x in like]
        return self.state_grads[place]

    def release(self) -> None:
        """Forget rows, states and gradients, which nothing reads after this piece's own backward."""
        for kept in (self.rows, self.states, self.queries, self.kept, self.row_grads, self.state_grads):
            kept.clear()
        self._of_rows.release()
        self._of_states.release()
        self.chunk = None
        self.is_released = True


class _Gathered(NamedTuple):
    """Says which rows of a piece were gathered: row `rows[i]` of head `heads[i]` became row `places[i]`.

    Attributes:
        grads: the gradients of all gathered rows, as parts (n, G, D).
    """

    piece: Piece
    place: Place
    rows: Tensor
    heads: Tensor
    places: Tensor
    grads: tuple[Tensor, ...]


class Before:
    """Gives the pieces of a step the rows and states before them, and takes their gradients back.

    Args:
        parents: for each piece of the step, the piece before it.
        wants_gradients: False for a forward alone.
    Raises:
        StepError: a backward went through what was before.
    """

    def __init__(self, parents: list[Piece | None], device: torch.device, *, wants_gradients: bool) -> None:
        if any(parent is not None and parent.oldest.is_released for parent in parents):
            raise gone_through()
        self._device = device
        self._parents, self.wants_gradients = parents, wants_gradients
        self._leaves: dict[Place, list[Tensor]] = {}
        self._gathered: list[_Gathered] = []

    def rows(self, i: int, place: Place, spec: AttentionSpec) -> list[Rows]:
        """Return the rows before piece i of the step that its tokens may see, oldest first."""
        parent = self._parents[i]
        if parent is None:
            return []
        since = 0 if spec.window is None else max(0, parent.end - spec.window + 1)
        found, oldest = list[Rows](), list[Rows]()
        if spec.policy is not None:
            since = parent.kept[place].at
            parts, grads = self.kept_rows(i, place)
            dk, dv = (None, None) if grads is None else _keys_and_values(grads, spec)
            oldest = [Rows(*_keys_and_values(parts, spec), dk, dv)]
        for piece in parent.path(since):
            (k, v), dk, dv = _keys_and_values(piece.rows[place], spec), None, None
            if self.wants_gradients:
                dk, dv = _keys_and_values(piece.own_row_grads(place), spec)
            found.append(Rows(k, v, dk, dv).cut(max(0, since - piece.start), len(piece.tokens)))
        return oldest + found[::-1]

    def kept(self, i: int, place: Place) -> Kept | None:
        """Return what a policy has kept before piece i of the step; None at the beginning of a text."""
        parent = self._parents[i]
        return None if parent is None else parent.kept[place]

    def kept_rows(self, i: int, place: Place) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
        """Gather the rows (n, G, D) that a policy has kept before piece i of the step, and room for their gradients."""
        parent = self._parents[i]
        assert parent is not None
        positions_GN = parent.kept[place].positions.cpu()
        like = parent.rows[place]
        parts = tuple(x.new_empty(positions_GN.shape[1], *x.shape[1:], device=self._device) for x in like)
        grads = None
        if self.wants_gradients:
            grads = tuple(torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in parts)
        for piece in parent.path():
            heads, places = ((positions_GN >= piece.start) & (positions_GN < piece.end)).nonzero(as_tuple=True)
            if not len(heads):
                continue
            rows = positions_GN[heads, places] - piece.start
            for part, own in zip(parts, piece.rows[place], strict=True):
                part[places, heads] = own[rows, heads].to(part.device)
            if grads is not None:
                self._gathered.append(_Gathered(piece, place, rows, heads, places, grads))
        return parts, grads

    def unfolded(self, i: int, place: Place, since: int) -> list[tuple[Tensor, ...]]:
        """Return the rows at positions `since` or later, before piece i of the step, oldest first."""
        parent, found = self._parents[i], []
        for piece in [] if parent is None else parent.path(since):
            queries = piece.queries.get(place)
            n_rows = piece.end - max(since, piece.start)
            parts = (*piece.rows[place], *([] if queries is None else [queries]))
            found.append(tuple(part[len(part) - n_rows :].to(self._device) for part in parts))
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
            leaves.append(torch.stack(parts).requires_grad_(self.wants_gradients))
        self._leaves[place] = leaves
        return leaves

    def hand_back(self) -> None:
        """Add the gradients of states and gathered rows to their pieces. Those of other rows were added in place."""
        for piece, place, rows, heads, places, grads in self._gathered:
            for total, grad in zip(piece.own_row_grads(place), grads, strict=True):
                total.index_put_((rows, heads), grad[places, heads].to(total.device), accumulate=True)
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
