"""Holds the body of attention under an eviction policy: rows that are kept, and after them rows evicted lately.

A fold at a fold point evicts rows as seen from all lengths of at least the fold point plus the rollback window. A
sequence that was rolled back to a shorter length must see these rows, as if it had never gone further. So a body holds
them for one more window, in a ring:

    rows of a body   0 ................ budget ................. budget + ring_rows
                      kept, by position  | evicted by the last folds

Every head loses the same number of rows in a fold, so the rows' places in the ring follow from fold points alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.blocks.arrays import Bools, ceil_div
from hybridmem.memory.blocks.staging import is_apart
from hybridmem.memory.errors import SpecError
from hybridmem.memory.eviction import Candidates, EvictionPolicy
from hybridmem.memory.kernels import Scoring
from hybridmem.memory.quantization import Parts, Storage
from hybridmem.memory.specs import AttentionSpec, StateTensor

_BESIDE = ("positions", "scores")
"""Names of the state tensors whose first axis counts rows, with any storage."""


@dataclass(frozen=True)
class Rows:
    """Holds rows of one attention of a sequence. Rows of different heads may have different positions.

    Attributes:
        parts: (G, R, D) each: keys, and values unless they are part of the keys; or the parts as which a storage
            encodes them.
        positions: (G, R) int64.
        scores: (G, R) float32, the scores that the policy has given.
    """

    parts: Parts
    positions: Tensor
    scores: Tensor

    def take(self, index_GN: Tensor) -> Rows:
        """Return chosen rows of each head."""
        parts = tuple(part.gather(1, index_GN[:, :, None].expand(-1, -1, part.shape[2])) for part in self.parts)
        return Rows(parts, self.positions.gather(1, index_GN), self.scores.gather(1, index_GN))

    def between(self, start: int, end: int) -> Rows:
        """Return rows [start, end) of each head, as views."""
        parts = tuple(part[:, start:end] for part in self.parts)
        return Rows(parts, self.positions[:, start:end], self.scores[:, start:end])

    def fill_(self, rows: Rows) -> None:
        """Overwrite these rows with the same number of other rows."""
        for own, other in zip(self.parts, rows.parts, strict=True):
            own.copy_(other)
        self.positions.copy_(rows.positions)
        self.scores.copy_(rows.scores)

    @staticmethod
    def join(several: Sequence[Rows]) -> Rows:
        """Return all rows of several objects, joined in order."""
        if len(several) == 1:
            return several[0]
        parts = tuple(torch.cat(pieces, 1) for pieces in zip(*(rows.parts for rows in several), strict=True))
        return Rows(parts, torch.cat([r.positions for r in several], 1), torch.cat([r.scores for r in several], 1))


class KeptRows:
    """Defines the layout of bodies for a policy and storage, reads and writes bodies, and lets the policy choose.

    Attributes:
        ring_rows: how many evicted rows a body still holds: a rollback window of them, rounded up to whole folds.
        body_rows: how many rows a body has, evicted rows included.
    """

    def __init__(self, policy: EvictionPolicy, storage: Storage | None, rollback_window: int) -> None:
        self.policy, self.storage = policy, storage
        self.ring_rows = ceil_div(rollback_window, policy.every) * policy.every
        self.body_rows = policy.budget_tokens + self.ring_rows

    # The methods below say which rows are where. They compute it from fold points alone.

    def n_kept(self, fold_point: int) -> int:
        """Return how many of the rows before a fold point each head keeps."""
        return min(fold_point, self.policy.budget_tokens)

    def evicted(self, since: int, until: int) -> list[slice]:
        """Return where a body holds the rows that were evicted by the folds after `since`, up to the one at `until`.

        The rows that were evicted first come first.
        """
        budget, ring_rows = self.policy.budget_tokens, max(1, self.ring_rows)
        first, last = (at - self.n_kept(at) for at in (since, until))
        start, end = budget + first % ring_rows, budget + first % ring_rows + last - first
        if end <= self.body_rows:
            return [slice(start, end)]
        return [slice(start, self.body_rows), slice(budget, end - ring_rows)]

    def remembered_since(self, body_at: int) -> int:
        """Return the first fold point after which a body at this position still holds the rows that folds evicted."""
        return max(0, body_at - self.ring_rows)

    def are_live(self, body_at: int) -> Bools:
        """Return (body_rows,) which rows of a body at this position are in use."""
        live: Bools = np.arange(self.body_rows) < self.n_kept(body_at)
        for places in self.evicted(self.remembered_since(body_at), body_at):
            live[places] = True
        return live

    # The methods below read and write tensors.

    def states_of(self, spec: AttentionSpec) -> tuple[StateTensor, ...]:
        """Return the tensors of a body: rows, their positions and scores."""
        n_heads, n_rows = spec.n_kv_heads, self.body_rows
        if self.storage is None:
            stored = [StateTensor("kept", (n_rows, spec.n_parts, n_heads, spec.head_dim), dtype=None)]
        else:  # Single rows are evicted, so keys are grouped by row, as values are.
            shapes = self.storage.shapes(n_heads, n_rows, spec.head_dim, by_channel=False)
            names = (f"{part} {i}" for part in ("keys", "values") for i in range(len(shapes)))
            stored = [StateTensor(name, *shape) for name, shape in zip(names, (*shapes, *shapes), strict=True)]
        return (*stored, *(StateTensor(name, (n_rows, n_heads)) for name in _BESIDE))

    def row_axis_of(self, state: StateTensor) -> int:
        """Return the axis of one of these tensors that counts rows. A storage lays its parts out head by head."""
        return 0 if self.storage is None or state.name in _BESIDE else 1

    def all_of(self, body: list[Tensor]) -> Rows:
        """Return all rows of a body, given by its tensors, as views."""
        *stored, positions_RG, scores_RG = body
        parts = tuple(stored[0].permute(1, 2, 0, 3)) if self.storage is None else tuple(stored)
        return Rows(parts, positions_RG.T, scores_RG.T)

    def kept_of(self, body: list[Tensor], body_at: int) -> Rows:
        """Return the rows that a body at this position keeps."""
        return _exact(self.all_of(body).between(0, self.n_kept(body_at)))

    def evicted_of(self, body: list[Tensor], since: int, until: int) -> Rows:
        """Return the rows that were evicted by the folds after `since`, up to the one at `until`."""
        rows = self.all_of(body)
        return _exact(Rows.join([rows.between(own.start, own.stop) for own in self.evicted(since, until)]))

    def seen_at(self, body: list[Tensor], body_at: int, fold_point: int) -> Rows:
        """Return the rows that a body held at an earlier fold point, by position, and the rows folded since then.

        With a storage, rows that have folded since then are left out, because queries read them from the tail.
        """
        rows = Rows.join([self.kept_of(body, body_at), self.evicted_of(body, fold_point, body_at)])
        order_GR = rows.positions.argsort(1)
        n_seen = len(order_GR[0]) if self.storage is None else self.n_kept(fold_point)
        return rows.take(order_GR[:, :n_seen])

    def write(self, body: list[Tensor], body_at: int, kept: Rows, evicted: Rows | None) -> None:
        """Write a body at this position: the rows that it keeps, and the rows evicted since `remembered_since`."""
        rows = self.all_of(body)
        rows.between(0, kept.positions.shape[1]).fill_(kept)
        if evicted is None:
            return
        n_written = 0
        for own in self.evicted(self.remembered_since(body_at), body_at):
            n_rows = own.stop - own.start
            rows.between(own.start, own.stop).fill_(evicted.between(n_written, n_written + n_rows))
            n_written += n_rows

    # The methods below fold rows.

    def encoded(self, rows_GRD: Sequence[Tensor]) -> Parts:
        """Return keys, and values if there are any, (G, R, D) each, in the form in which a body holds them."""
        if self.storage is None:
            return tuple(rows_GRD)
        return tuple(part for x_GRD in rows_GRD for part in self.storage.encode(x_GRD, by_channel=False))

    def decoded(self, parts: Parts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values, (G, R, D) each. They are the same tensor if values are a part of the keys."""
        if self.storage is None:
            return parts[0], parts[-1]
        n = len(parts) // 2
        return self.storage.decode(parts[:n]).to(dtype), self.storage.decode(parts[n:]).to(dtype)

    def fold(
        self, body: list[Tensor], first: int, last: int, rows_NXD: Tensor, spec: AttentionSpec, scoring: Scoring
    ) -> tuple[Rows, Rows | None]:
        """Let the policy choose among the rows of a body at `first` and rows (N, X, D) of the tokens [first, last).

        Rows fold `every` at a time. Returns the rows that are kept, and those evicted since `remembered_since(last)`.
        """
        policy, n_heads = self.policy, spec.n_kv_heads
        since = self.remembered_since(last)
        kept, evicted = self.kept_of(body, first), list[Rows]()
        if since < first:
            evicted.append(self.evicted_of(body, since, first))
        for begin in range(first, last, policy.every):
            chunk_NXD = rows_NXD[begin - first : begin - first + policy.every]
            sizes = [n_heads] * spec.n_parts + [chunk_NXD.shape[1] - spec.n_parts * n_heads]
            *kv_GND, q_HND = torch.split(chunk_NXD.transpose(0, 1), sizes)
            parts = tuple(torch.cat(pair, 1) for pair in zip(kept.parts, self.encoded(kv_GND), strict=True))
            new = torch.arange(begin, begin + policy.every, device=rows_NXD.device).expand(n_heads, -1)
            rows = Rows(parts, torch.cat([kept.positions, new], 1), F.pad(kept.scores, (0, policy.every)))
            queries = q_HND.transpose(0, 1) if policy.needs_queries else None
            k_GRD, v_GRD = self.decoded(parts, rows_NXD.dtype)
            chosen_GB, scores_GR = _kept_by(
                policy, Candidates(k_GRD, v_GRD[..., : spec.value_dim], rows.positions, rows.scores, queries, scoring)
            )
            (n_rows, n_kept), rows = (
                (rows.positions.shape[1], chosen_GB.shape[1]),
                Rows(parts, rows.positions, scores_GR),
            )
            if begin + policy.every <= since or n_kept == n_rows:
                kept = rows.take(chosen_GB)
                continue
            rows = rows.take(torch.cat([chosen_GB, _others(chosen_GB, n_rows)], 1))
            kept = rows.between(0, n_kept)
            evicted.append(rows.between(n_kept, n_rows))
        return kept, Rows.join(evicted) if evicted else None


def _exact(rows: Rows) -> Rows:
    """Return rows with integer positions. A body holds positions as float32, which are exact up to 16 million."""
    return Rows(rows.parts, rows.positions.long(), rows.scores)


def _others(chosen_GB: Tensor, n_rows: int) -> Tensor:
    """Return the ascending indices below `n_rows` that each head has not chosen.

    The host does not wait for the device.
    """
    is_chosen = torch.zeros(len(chosen_GB), n_rows, dtype=torch.uint8, device=chosen_GB.device)
    is_chosen.scatter_(1, chosen_GB, 1)
    return is_chosen.argsort(stable=True, dim=1)[:, : n_rows - chosen_GB.shape[1]]


def _kept_by(policy: EvictionPolicy, rows: Candidates) -> tuple[Tensor, Tensor]:
    """Call a policy's `EvictionPolicy.keep`. Raises SpecError unless the results fit a body."""
    chosen_GB, scores_GR = policy.keep(rows)
    n_heads, n_rows = rows.positions.shape
    n_kept = min(n_rows, policy.budget_tokens)
    if chosen_GB.shape != (n_heads, n_kept) or chosen_GB.dtype != torch.int64 or scores_GR.shape != (n_heads, n_rows):
        raise SpecError(
            f"{type(policy).__name__}.keep must give int64 indices {(n_heads, n_kept)} and scores {(n_heads, n_rows)}, "
            f"and gave {tuple(chosen_GB.shape)} of {chosen_GB.dtype} and {tuple(scores_GR.shape)}"
        )
    is_own = type(policy).keep is not EvictionPolicy.keep and not is_apart(chosen_GB.device)
    if is_own and not ((chosen_GB >= 0) & (chosen_GB < n_rows)).all():
        raise SpecError(f"{type(policy).__name__}.keep gave indices of rows that are not there; give 0 to {n_rows - 1}")
    return chosen_GB, scores_GR
