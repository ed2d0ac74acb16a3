"""Describes the two pools of a tail table: what their blocks, states and tails, hold for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.sequences.folding import TailRules
from hybridmem.memory.specs import RecurrentSpec, StateTensor


@dataclass(frozen=True)
class TailMember:
    """Says what the blocks of a table hold for one layer's recurrence or attention.

    Attributes:
        states: the tensors of a state. A body, a head and a kept state all consist of them.
        row_shape: the shape of the row that a tail holds for each token, in the table's dtype. None: it holds no row.
        parts: (shape, dtype) of the other tensors that a tail holds for each token. A dtype of None means the table's
            dtype.
    """

    states: tuple[StateTensor, ...]
    row_shape: tuple[int, ...] | None
    parts: tuple[tuple[tuple[int, ...], torch.dtype | None], ...] = ()

    @staticmethod
    def of(spec: RecurrentSpec, *, deferred: bool) -> TailMember:
        """Return what a recurrence needs in a table. `deferred` is for fold mode "defer", which has no heads."""
        has_rows, parts = spec.has_rows(deferred=deferred), spec.tail_parts(deferred=deferred)
        return TailMember(spec.states, spec.row_shape if has_rows else None, tuple(parts[has_rows:]))

    @property
    def tail_parts(self) -> list[tuple[tuple[int, ...], torch.dtype | None]]:
        """Return (shape, dtype) of everything that a tail holds for each token, with the row first."""
        return [*([] if self.row_shape is None else [(self.row_shape, None)]), *self.parts]


class TailBlocks:
    """Makes a pool of states and a pool of tails.

    It knows what is where in a block, but not which slot has which block.

    Args:
        dtype: the dtype of rows, and of tensors whose own dtype is None.
        label: the end of the pools' names.
        row_axes: the `Field.row_axis` of each state tensor. It is None for a tensor that holds no rows.
    """

    def __init__(
        self, members: list[TailMember], dtype: torch.dtype, rules: TailRules, store: Store, *, label: str = "",
        row_axes: Sequence[int | None] | None = None,
    ) -> None:  # fmt: skip
        self.members, self.dtype, self.rules, self.store = members, dtype, rules, store
        states = [(t.stored_shape, t.dtype or dtype) for m in members for t in m.states]
        self.state_layout = BlockLayout.of(states, row_axes).shared_by([len(m.states) for m in members])
        rings = [((rules.tail_rows, *shape), of or dtype) for m in members for shape, of in m.tail_parts]
        self.tail_layout = BlockLayout.of(rings, [0] * len(rings)).shared_by([len(m.tail_parts) for m in members])
        self.states = store.make_pool("states" + label, self.state_layout, from_top=True)
        self.tails = store.make_pool("tails" + label, self.tail_layout, from_top=True)
