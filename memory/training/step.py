"""Stands in for `memory.Step` where a model is trained: models call the same functions, which can be differentiated."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.errors import StepError
from hybridmem.memory.kernels.signature import Scoring
from hybridmem.memory.sequences.choosing import ChosenRows
from hybridmem.memory.specs import AttentionSpec, IndexSpec, LayerSpec, MemorySpec, RecurrentSpec
from hybridmem.memory.training import attention, kernels
from hybridmem.memory.training.kept import Folding, Kept
from hybridmem.memory.training.kernels import Slot
from hybridmem.memory.training.pieces import Before, Piece, Place
from hybridmem.memory.training.segments import Segments


class TrainingStates:
    """Stands in for `memory.States`: the start states of S segments, and the end states of a recurrence.

    Attributes:
        sources: for each state, (S,) of which -1 says that the segment begins its sequence.
    """

    tails = None
    kernels = kernels

    def __init__(self, spec: RecurrentSpec, segments: Segments, before: list[Tensor], begins: Int64s) -> None:
        self.spec, self._segments, self.begins = spec, segments, begins
        self._slots = [Slot(segments, tensor) for tensor in before]
        is_begin = torch.from_numpy(begins == 0).to(segments.device)
        self.sources = [torch.where(is_begin, -1, 0)] * len(before)

    @property
    def cu_rows(self) -> Int64s:
        return self._segments.cu_rows

    @property
    def device_cu_rows(self) -> Tensor:
        return torch.from_numpy(self.cu_rows).to(self._segments.device)

    def slots(self, index: int) -> Slot:
        return self._slots[index]

    def start(self) -> tuple[Tensor, ...]:
        return tuple(
            slot.before if state.dtype is None else slot.before.float()
            for slot, state in zip(self._slots, self.spec.states, strict=True)
        )

    def end(self, *tensors: Tensor) -> TrainingStates:
        for slot, tensor in zip(self._slots, tensors, strict=True):
            slot.after = tensor
        return self

    def written(self) -> TrainingStates:
        return self

    def ended(self) -> list[Tensor]:
        """Return the end states, (S, *shape) each, in the dtypes in which they began."""
        if any(slot.after is None for slot in self._slots):
            raise StepError(f"{self.spec.family!r} did not write its end states")
        return [slot.after.to(slot.before.dtype) for slot in self._slots if slot.after is not None]


class TrainingStep:
    """Feeds new tokens of several pieces to a model. Its attributes and functions are those of `memory.Step`.

    Args:
        select: (rows,) the packed rows whose outputs are wanted.
        rollback_window: how many of the newest rows do not fold, where attention has a policy.

    Attributes:
        rows, states: what the pieces leave behind, packed or stacked.
        choices: for each attention with a policy, what it keeps of each piece's text, and the queries it observes next.
    """

    def __init__(
        self, spec: MemorySpec, pieces: list[Piece], before: Before, select: Tensor, rollback_window: int
    ) -> None:
        self._rollback_window = rollback_window
        self.choices: dict[Place, list[tuple[Kept, Tensor | None]]] = {}
        self.spec, self._before, self._select = spec, before, select
        self.segments = Segments([len(piece.tokens) for piece in pieces], spec.device)
        self.token_ids = torch.cat([piece.tokens for piece in pieces])
        self._begins = np.array([piece.start for piece in pieces], np.int64)
        self.positions = torch.cat([torch.arange(piece.start, piece.end, device=spec.device) for piece in pieces])
        self.rotary_positions = self.positions
        self.cu_seqlens = self.segments.cu_rows
        self.notes: dict[Hashable, Any] = {}
        self.rows: dict[Place, tuple[Tensor, ...]] = {}
        self.states: dict[Place, list[Tensor]] = {}

    def check_model(self, spec: MemorySpec) -> None:
        """Raise StepError unless the model has the spec for which this step was made."""
        self.spec.check_model(spec)

    def embed(self, look_up: Any) -> Tensor:
        embedded: Tensor = look_up(self.token_ids)
        return embedded

    def select(self, hidden: Tensor) -> Tensor:
        return hidden[self._select]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None = None, *, scale: float | None = None,
        softcap: float | None = None, sinks: Tensor | None = None, bias: Tensor | None = None, name: str | None = None,
        chosen: ChosenRows | None = None,
    ) -> Tensor:  # fmt: skip
        place, spec = self._claim(layer, name, AttentionSpec)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        scoring = Scoring(scale, spec.window, softcap, sinks, bias)
        self.rows[place] = (k,) if v is None else (k, v)
        values = k[..., : spec.value_dim] if v is None else v
        ys = []
        by_query = None if bias is None or bias.dim() == 2 else self.segments.split(bias)
        for i, (own_q, own_k, own_v) in enumerate(zip(*map(self.segments.split, (q, k, values)), strict=True)):
            scoring = scoring if by_query is None else scoring._replace(bias_HL=by_query[i])
            seen = None if chosen is None or chosen.positions is None else chosen.positions[i]
            ys.append(attention.attend(own_q, own_k, own_v, self._before.rows(i, place, spec), scoring, seen))
        if spec.policy is not None and not self._before.wants_gradients:
            with torch.no_grad():
                self.choices[place] = self._fold(place, spec, q, scoring)
        return torch.cat(ys)

    def _fold(self, place: Place, spec: AttentionSpec, q: Tensor, scoring: Scoring) -> list[tuple[Kept, Tensor | None]]:
        """Let a policy choose which rows the texts of all pieces keep, after these."""
        folding = Folding(spec, self._rollback_window)
        observed = [q] if folding.observes else []
        choices = []
        for i, new in enumerate(zip(*map(self.segments.split, (*self.rows[place], *observed)), strict=True)):
            kept = self._before.kept(i, place)
            old: tuple[Tensor, ...] = tuple(x[:0] for x in new[: spec.n_parts])
            if kept is None:
                kept = Kept.nothing(spec.n_kv_heads, self.spec.device)
            elif kept.positions.shape[1]:
                old = self._before.kept_rows(i, place)[0]
            at = folding.point(int(self._begins[i]) + len(new[0]))
            if at > kept.at:
                rows = [torch.cat(parts, 1) for parts in (*self._before.unfolded(i, place, kept.at), new)]
                kept = folding.fold(kept, torch.cat(rows)[: at - kept.at], old, at, scoring)
            n_left = int(self._begins[i]) + len(new[0]) - at
            choices.append((kept, new[-1][-n_left:] if observed and n_left else new[-1][:0] if observed else None))
        return choices

    def choose(
        self, layer: int, q: Tensor, k: Tensor, weights: Tensor, *, scale: float | None = None, name: str | None = None
    ) -> ChosenRows:
        """Choose rows as `Step.choose` does; which rows were chosen has no gradient.

        The result has a mask (queries, rows) of the chosen rows for each piece.
        """
        place, spec = self._claim(layer, name, IndexSpec)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.rows[place] = (k.detach(),)
        masks = []
        with torch.no_grad():
            parts = zip(*map(self.segments.split, (q, k, weights)), strict=True)
            for i, (own_q, own_k, own_weights) in enumerate(parts):
                k_RD = torch.cat([*self._before.index_keys(i, place, self.spec.device), own_k])[:, 0].float()
                masks.append(_seen_rows(own_q, k_RD, own_weights, scale, spec))
        return ChosenRows(spec.n_chosen, masks, spec.span_tokens)  # type: ignore[arg-type]

    def cross_attend(self, layer: int, q: Tensor, *, scale: float | None = None, name: str | None = None) -> Tensor:
        raise StepError(f"layer {layer} reads an encoder's output, for which no gradients are computed here")

    def recur(self, layer: int, rows: Tensor, recurrence: Any, *, name: str | None = None) -> Tensor:
        place, spec = self._claim(layer, name, RecurrentSpec)
        before = self._before.states(place, spec, self.spec.device, self.spec.dtype)
        states = TrainingStates(spec, self.segments, before, self._begins)
        y: Tensor = recurrence(states, rows)[0]
        self.states[place] = states.ended()
        return y

    def _claim(self, layer: int, name: str | None, kind: type[Any]) -> tuple[Place, Any]:
        """Return place and spec of the memory that a call names."""
        found: list[LayerSpec] = [m for m in self.spec.layers[layer] if isinstance(m, kind) and name in (None, m.name)]
        if len(found) != 1:
            raise StepError(f"layer {layer} has {len(found)} memories of {kind.__name__}; name={name!r} picks none")
        return (layer, found[0].name), found[0]


def _seen_rows(q_THD: Tensor, k_RD: Tensor, weights_TH: Tensor, scale: float, spec: IndexSpec) -> Tensor:
    """Return (T, R): True for the rows that an index chooses for a query, and for rows after its last whole span.

    The queries are those of the newest T of R tokens. Of spans with equal scores, the oldest are chosen.
    """
    span, n_rows = spec.span_tokens, len(k_RD)
    ends_T1 = torch.arange(n_rows - len(q_THD), n_rows, device=k_RD.device)[:, None] + 1
    k_KD = k_RD[span - 1 :: span]  # The key of a span is that of its last token.
    products_THK = torch.einsum("thd,kd->thk", q_THD.float(), k_KD).mul_(scale).relu_()
    scores_TK = torch.einsum("th,thk->tk", weights_TH, products_THK)
    scores_TK = scores_TK.masked_fill_(torch.arange(len(k_KD), device=k_RD.device) >= ends_T1 // span, -torch.inf)
    best_first = scores_TK.sort(dim=1, descending=True, stable=True).indices[:, : spec.n_chosen // span]
    chosen_TK = torch.zeros_like(scores_TK, dtype=torch.bool).scatter_(1, best_first, True)
    is_seen_TR = torch.arange(n_rows, device=k_RD.device) >= ends_T1 // span * span
    is_seen_TR[:, : len(k_KD) * span] |= chosen_TK.repeat_interleave(span, 1)
    return is_seen_TR
