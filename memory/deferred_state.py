"""The memory of recurrent layers that writes a state only when its body moves: no head, and nothing is run twice.

    position 0 ......... body_at ............................ start ............ end
                          | tail: rows, and what each token did --- | new rows of the step |

A step runs each recurrence from the body behind the tail: a kernel reads the state once, and from rings what the tokens since have
written to it (`memory.kernels.Tail`). When the body moves, the same kernel leaves the state of that position in a fresh block. On hardware
whose speed is that of its memory this is a decode step of half the bytes (ReplaySSM, Dao AI Lab 2026).

It takes recurrences all of whose states can be left behind (`StateTensor.ring`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memory.blocks.arrays import Int64s
from memory.blocks.store import Store
from memory.errors import SpecError
from memory.interface import Packed
from memory.kernels import Kernels, Prepared, Tail
from memory.recurrent_state import RecurrentState
from memory.sequences.folding import NOTHING, Columns, TailRules
from memory.specs import RecurrentSpec
from memory.state.access import Recurrence, RecurrentPlan, Run, States


@dataclass(frozen=True)
class DeferredPlan(RecurrentPlan):
    """One run a request, of all its new rows, behind its tail.

    Attributes:
        sources, targets: element size in bytes -> (S,) element offset of the tail block to read and to write.
        firsts, counts, folds: as `Tail` has them.
    """

    sources: dict[int, Prepared]
    targets: dict[int, Prepared]
    firsts: Prepared
    counts: Prepared
    folds: Prepared


class DeferredState(RecurrentState):
    """`memory.interface.LayerMemory` of all recurrences of all layers; see `RecurrentState`.

    Raises:
        SpecError: a recurrence whose state must stand at the newest position.
    """

    def __init__(
        self, specs: list[RecurrentSpec], dtype: torch.dtype, rules: TailRules, store: Store, *, kernels: Kernels | None = None
    ) -> None:
        if unable := sorted({spec.family for spec in specs if not spec.can_defer}):
            raise SpecError(f"fold='defer' is not for {', '.join(unable)}: a state of theirs is needed at each token; choose 'replay'")
        super().__init__(specs, dtype, rules, store, kernels=kernels)
        self._ring_sizes = {field.dtype.itemsize for field in self.tail_layout.fields}
        self._ring_flats: list[list[tuple[Prepared, ...]]] = []
        if not store.is_dry:
            fields = iter(self.tail_layout.fields)
            for spec, has_rows in zip(specs, self._has_rows, strict=True):
                rows = tuple(self._kernels.prepare(store.flat(next(fields))) for _ in range(has_rows))
                self._ring_flats.append(
                    [tuple(self._kernels.prepare(store.flat(next(fields))) for _ in s.ring or ()) or rows for s in spec.states]
                )

    def _plan_runs(self, packed: Packed, before: Columns, after: Columns, fresh: Int64s) -> DeferredPlan:
        moves = after.body_at > before.body_at
        source = np.where(before.body < 0, NOTHING, self.states.addresses[before.body])
        target = np.where(moves, self.states.addresses[after.body], NOTHING)
        self._store.upload(packed.cu_seqlens)  # for kernels that want it on the device: they find it there
        run = Run(packed.cu_seqlens, packed.starts, self._elements(source), self._elements(target), None, None)
        tails = (self._in_elements(self.tails.addresses[column.tail]) for column in (before, after))
        counts, folds = packed.starts - before.body_at, after.body_at - before.body_at
        positions = (self._place(x) for x in (before.body_at, counts, folds))
        return DeferredPlan(packed, before, after, fresh, [run], self._writes(packed, after), *tails, *positions)

    def _in_elements(self, addresses: Int64s) -> dict[int, Prepared]:
        return {size: self._place(addresses // size) for size in self._ring_sizes}

    def recur(self, plan: RecurrentPlan, index: int, rows: Tensor, recurrence: Recurrence) -> Tensor:
        assert isinstance(plan, DeferredPlan), "made here"
        spec = self._specs[index]
        self._require_rows(spec, rows, plan.packed)
        tails = [self._tail(plan, flats) for flats in self._ring_flats[index]]
        outputs = self._run_one(States(spec, self._kernels, self._state_flats[index], plan.runs[0], tails), rows, recurrence)
        self._write_tail(plan, index, rows)
        return outputs

    def _tail(self, plan: DeferredPlan, flats: tuple[Prepared, ...]) -> Tail:
        sources, targets = (tuple(blocks[flat.itemsize] for flat in flats) for blocks in (plan.sources, plan.targets))
        return Tail(flats, sources, targets, self.rules.tail_rows, plan.firsts, plan.counts, plan.folds)
