"""Lets recurrent states take steps over trees of draft tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s, starts_of
from hybridmem.memory.interface import Packed
from hybridmem.memory.recurrent_state import RecurrentPlan, RecurrentState
from hybridmem.memory.sequences.batch import requests_of
from hybridmem.memory.sequences.draft_trees import DraftTrees
from hybridmem.memory.sequences.folding import NOTHING
from hybridmem.memory.state.access import Recurrence
from hybridmem.memory.state.branches import BranchReader, BranchReads
from hybridmem.memory.state.tails import TailStep


@dataclass(eq=False)
class TreeRecurrentPlan(RecurrentPlan[Any]):
    """Holds the blocks of all requests of a step, some of which have trees.

    Until a path is accepted, the blocks of a tree are those of its longest path, which holds room for any path.

    Attributes:
        reads, writes: those of `others`, or of nothing.
        trees: the trees.
        others: the plan of the requests without trees; None if there are none.
        other_tokens, nodes: the packed indices of their tokens, and of those of trees.
        branches: what recurrences read of trees.
        held: number of a recurrence -> the rows of the trees' tokens, until a path is accepted.
        chain: the plan of the accepted paths; None before, or if nothing is accepted.
    """

    trees: DraftTrees
    others: RecurrentPlan[Any] | None
    other_tokens: Tensor
    nodes: Tensor
    branches: BranchReads
    held: dict[int, Tensor] = field(default_factory=dict)
    chain: RecurrentPlan[Any] | None = None


class TreeRecurrence:
    """Runs the steps of a `RecurrentState` in which requests have trees.

    No state and no tail changes before a path is accepted. Then the rows of its tokens run as those of an ordinary
    step, so that the states are those of a sequence that was fed this path alone.
    """

    def __init__(self, state: RecurrentState[Any]) -> None:
        self._state = state
        self._branches = BranchReader(state.reader, state.blocks)

    def plan(self, trees: DraftTrees) -> TreeRecurrentPlan:
        """Allocate the blocks that the step will write. Raises CapacityError with nothing changed."""
        state, upload = self._state, self._state.store.upload
        step = state.plan_blocks(trees.deepest)
        try:
            others = self._plan(_part(step, trees.others)) if len(trees.others) else None
            branches = self._branches.plan(_part(step, trees.requests), trees.paths)
            reads, writes = (None, None) if others is None else (others.reads, others.writes)
            tokens, nodes = upload(trees.other_tokens), upload(trees.nodes)
            return TreeRecurrentPlan(step, reads, writes, trees, others, tokens, nodes, branches)  # type: ignore[arg-type]
        except BaseException:
            state.free_blocks(step)
            raise

    def _plan(self, step: TailStep) -> RecurrentPlan[Any]:
        reader = self._state.reader
        return RecurrentPlan(step, reader.plan(step), reader.access.plan_writes(step))

    def begin(self, plan: TreeRecurrentPlan) -> None:
        """Begin the requests without trees. Those with trees write nothing before a path is accepted."""
        if plan.others is not None:
            self._state.begin(plan.others)

    def recur(self, plan: TreeRecurrentPlan, index: int, rows: Tensor, recurrence: Recurrence) -> Tensor:
        """Run recurrence `index` over the step's rows (T, *row_shape), and return outputs (T, ...)."""
        state = self._state
        state.require_rows(index, rows, len(plan.trees.packed.token_ids))
        own = plan.held[index] = rows[plan.nodes]
        found = self._branches.run(plan.branches, index, own, recurrence)
        outputs = found.new_empty(len(rows), *found.shape[1:])
        outputs[plan.nodes] = found
        if plan.others is not None:
            rest = rows[plan.other_tokens]
            outputs[plan.other_tokens] = state.reader.run(plan.others.reads, index, rest, recurrence)
            state.reader.access.write_rows(index, plan.others.writes, rest)
        return outputs

    def remember(self, index: int, recurrence: Recurrence) -> None:
        """See `RecurrentState.remember`."""
        self._state.remember(index, recurrence)

    def give_back(self, plan: TreeRecurrentPlan) -> None:
        """Release the blocks of the longest paths."""
        step, requests = plan.step, plan.trees.requests
        reserved = _part(step, requests)
        step.fresh[:, requests] = NOTHING
        self._state.free_blocks(reserved)

    def settle(self, plan: TreeRecurrentPlan, accepted: Packed) -> TreeRecurrentPlan:
        """Allocate the blocks that the accepted paths need, which are no more than the longest paths had."""
        state, step, requests = self._state, plan.step, plan.trees.requests
        chain, moved = None, requests[accepted.counts[requests] > 0]
        if len(moved):
            own = state.plan_blocks(requests_of(accepted, moved)[0])
            try:
                chain = self._plan(own)
                state.begin(chain)
            except BaseException:
                state.free_blocks(own)
                raise
            step.before.table[:, moved], step.after.table[:, moved] = own.before.table, own.after.table
            step.fresh[:, moved] = own.fresh
        settled = TailStep(replace(accepted, starts=step.packed.starts), step.before, step.after, step.fresh)
        return replace(plan, step=settled, chain=chain)

    def keep(self, plan: TreeRecurrentPlan, paths: Mapping[int, Int64s]) -> None:
        """Run the rows of the accepted paths, as an ordinary step does, and write them to the tails."""
        if plan.chain is not None and plan.held:
            state, reader = self._state, self._state.reader
            firsts = starts_of(plan.trees.packed.counts[plan.trees.requests])
            tokens = [first + paths[i] for first, i in zip(firsts, plan.trees.trees, strict=False)]
            chosen = state.store.upload(np.concatenate(tokens))
            for index, own in plan.held.items():
                rows = own[chosen]
                reader.run(plan.chain.reads, index, rows, state.recurrences[index])
                reader.access.write_rows(index, plan.chain.writes, rows)
        plan.held.clear()
        plan.branches.scratch.clear()

    def scratch_bytes(self, plan: TreeRecurrentPlan) -> int:
        """Return the bytes of rows that wait until a path is accepted, and of states that a layer needs meanwhile."""
        return sum(own.nbytes for own in (*plan.held.values(), *plan.branches.scratch))


def _part(step: TailStep, requests: Int64s) -> TailStep:
    """Return the part of a step that belongs to these requests, which ascend."""
    packed, _ = requests_of(step.packed, requests)
    return TailStep(packed, step.before.take(requests), step.after.take(requests), step.fresh[:, requests])
