"""Lets attention caches take steps over trees of draft tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from hybridmem.memory.attention.offload import HostedAttention, HostedPlan, PartPlan
from hybridmem.memory.attention.selection import part_of
from hybridmem.memory.attention_cache import AttentionCache
from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.errors import SequenceError
from hybridmem.memory.interface import Packed
from hybridmem.memory.kernels import Scoring, TreePaths
from hybridmem.memory.sequences.draft_trees import DraftTrees
from hybridmem.memory.sequences.reads import AttentionPlan, Read


@dataclass(eq=False, kw_only=True)
class TreeAttentionPlan(AttentionPlan):
    """Holds the pages of a step in which requests have trees. Their rows are stored one after the other.

    Attributes:
        trees: the trees.
        others: what the requests without trees read; None if there are none.
        nodes, paths: what the tokens of trees read.
    """

    trees: DraftTrees
    others: Read | None
    nodes: Read
    paths: TreePaths


class TreeAttention:
    """Runs the steps of an `AttentionCache` in which requests have trees.

    A token attends to the rows of its sequence and of the tokens on its path, which are all in pages. Rows of other
    branches are never read. When a path is accepted, its rows move together, to the places at which a sequence that was
    fed this path alone would have stored them.
    """

    def __init__(self, cache: AttentionCache) -> None:
        self._cache = cache

    def plan(self, trees: DraftTrees) -> TreeAttentionPlan:
        """Allocate pages for all tokens of the step. Raises CapacityError with nothing changed."""
        cache = self._cache
        plan = cache.plan(trees.stored)
        try:
            others = self._read(plan, trees.others, trees.other_tokens) if len(trees.others) else None
            nodes = self._read(plan, trees.requests, trees.nodes)
            starts = nodes.batch.kv_lengths - trees.packed.counts[trees.requests]
            paths = TreePaths(starts, *trees.paths_to_nodes)
            return TreeAttentionPlan(**vars(plan), trees=trees, others=others, nodes=nodes, paths=paths)
        except BaseException:
            cache.commit(plan, plan.packed.nothing)
            raise

    def _read(self, plan: AttentionPlan, requests: Int64s, tokens: Int64s) -> Read:
        """Return the pages that these requests read, whose packed tokens are `tokens`."""
        batch = part_of(plan.batch, plan.pages, requests, self._cache.place)
        return Read(batch, self._cache.store.upload(tokens))

    def _places(self, plan: AttentionPlan, request: int, kv_shape: tuple[int, int]) -> Int64s:
        """Return the element offset of each row of a request, for the first head of keys."""
        page_R, slot_R = np.divmod(np.arange(plan.batch.kv_lengths[request]), self._cache.page_tokens)
        places: Int64s = plan.pages[plan.batch.cu_pages[request] + page_R] + slot_R * kv_shape[1]
        return places

    def begin(self, plan: TreeAttentionPlan) -> None:
        """Copy the pages that the step must not write in place, and let the kernels plan its reads."""
        self._cache.copy_shared(plan)
        if plan.others is not None:
            self._cache.plan_read(plan.others)

    def attend(
        self, plan: TreeAttentionPlan, index: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """Write the step's keys and values. Return each token's attention: (T, H, D or value_dim)."""
        cache = self._cache
        cache.write(plan, index, q_THD, k_TGD, v_TGD)
        own = plan.nodes.tokens
        found = cache.read_paths(plan.nodes.batch, plan.paths, index, q_THD[own], scoring.of(own))
        out_THD = q_THD.new_empty(*q_THD.shape[:2], found.shape[-1])
        out_THD[own] = found
        if plan.others is not None:
            own = plan.others.tokens
            out_THD[own] = cache.read(plan.others.batch, index, q_THD[own], scoring.of(own))
        return out_THD

    def give_back(self, plan: TreeAttentionPlan) -> None:
        """Do nothing: `commit` releases the pages that the accepted paths do not need."""

    def settle(self, plan: TreeAttentionPlan, accepted: Packed) -> TreeAttentionPlan:
        """Return the plan for a step of the accepted tokens: `accepted`."""
        return replace(plan, packed=replace(plan.packed, peaks=accepted.peaks))

    def keep(self, plan: TreeAttentionPlan, paths: Mapping[int, Int64s]) -> None:
        """Move the rows of the accepted paths together."""
        for shape in self._cache.kv_shapes:
            sources, targets = list[Int64s](), list[Int64s]()
            for i, path in paths.items():
                moves = path != np.arange(len(path))
                first = int(plan.batch.kv_lengths[i]) - len(plan.trees.trees[i].parents)
                places = self._places(plan, i, shape)
                sources.append(places[first + path[moves]])
                targets.append(places[first + moves.nonzero()[0]])
            self._cache.move_rows(shape, np.concatenate(sources), np.concatenate(targets))

    def scratch_bytes(self, plan: TreeAttentionPlan) -> int:
        """Return 0: rows are in pages from the beginning."""
        return 0


class TreeHostedAttention:
    """Runs the steps of a `HostedAttention` in which requests have trees, for sequences that are on the device."""

    def __init__(self, hosted: HostedAttention, near: AttentionCache) -> None:
        self._hosted, self._near, self._trees = hosted, near, TreeAttention(near)

    def plan(self, trees: DraftTrees) -> HostedPlan:
        """See `TreeAttention.plan`. Raises SequenceError if a sequence of the step is in host memory."""
        slots = trees.packed.slots
        if far := [slot for slot in slots.tolist() if self._hosted.is_far(slot)]:
            raise SequenceError(
                f"{len(far)} of {len(slots)} sequences of a step with trees of drafts are in host memory; move them "
                "with memory.to_device(sequence), or leave parents= out"
            )
        part = PartPlan(self._near, self._near.store, self._trees.plan(trees), np.arange(len(slots)), None)
        return HostedPlan(trees.packed, [part], can_capture=False)

    def begin(self, plan: HostedPlan) -> None:
        """See `TreeAttention.begin`."""
        self._trees.begin(plan.parts[0].plan)

    def attend(self, plan: HostedPlan, *given: Any) -> Tensor:
        """See `TreeAttention.attend`."""
        return self._trees.attend(plan.parts[0].plan, *given)

    def give_back(self, plan: HostedPlan) -> None:
        """See `TreeAttention.give_back`."""

    def settle(self, plan: HostedPlan, accepted: Packed) -> HostedPlan:
        """See `TreeAttention.settle`."""
        (part,) = plan.parts
        return replace(plan, parts=[replace(part, plan=self._trees.settle(part.plan, accepted))])

    def keep(self, plan: HostedPlan, paths: Mapping[int, Int64s]) -> None:
        """See `TreeAttention.keep`."""
        self._trees.keep(plan.parts[0].plan, paths)

    def scratch_bytes(self, plan: HostedPlan) -> int:
        """See `TreeAttention.scratch_bytes`."""
        return 0
