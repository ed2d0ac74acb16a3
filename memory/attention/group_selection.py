"""Attention that keeps every row in few bits once it is old, and reads some of them: `page_selection` over `quantized_attention`.

What is chosen is a group of rows that have folded together. Its block holds, beside the codes, the least and the greatest of its exact
keys, written when it folds and never again. Exact rows are read by every query, on top of the policy's budget, as with policies that evict.

    position 0 ..................................... body_at ............... start ......... query
     groups of sinks | groups, the best for each head |  exact pages, all of them
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from memory.attention.page_selection import part_of
from memory.attention.quantized import QuantizedAttention, QuantizedPlan
from memory.attention_cache import Read
from memory.blocks.arrays import Int64s, ceil_div, ranges, starts_of
from memory.blocks.store import Store
from memory.eviction import Quest
from memory.kernels import FoldedRows, PageChoice, PagedBatch, Scoring
from memory.quantization import Shaped, Storage
from memory.specs import AttentionSpec


@dataclass(frozen=True)
class GroupPlan(QuantizedPlan):
    """As without a policy, and who reads what.

    Attributes:
        choice: what the queries that choose groups choose from, None if there are none; tokens: packed index of them (Q,).
        chosen: the exact rows that they read, each a request of its own; chosen_lengths: (Q,) of what they read of the body.
        rest: of requests that read everything, the exact rows, None if there are none; rest_tokens: packed index of their tokens.
        rest_blocks, rest_cu_blocks, rest_lengths: of those requests, as `FoldedRows` has it.
    """

    choice: PageChoice | None
    tokens: Tensor
    chosen: PagedBatch
    chosen_lengths: Int64s
    rest: PagedBatch | None
    rest_tokens: Tensor
    rest_blocks: Int64s
    rest_cu_blocks: Int64s
    rest_lengths: Int64s


class GroupSelection(QuantizedAttention):
    """Quantised pages, their bounds and exact tails of all attention layers of one `Quest` and storage: `memory.interface.LayerMemory`.

    Args:
        specs: the attention specs, in the order that `attend` numbers them; `policy` and `storage` are those of all of them.
    Raises:
        SpecError: as `QuantizedAttention`; or the policy's budget is less than the groups that it always reads.
    """

    def __init__(
        self, specs: list[AttentionSpec], policy: Quest, storage: Storage, dtype: torch.dtype, page_tokens: int, rollback_window: int,
        store: Store, name: str,
    ) -> None:  # fmt: skip
        self.policy, self._dtype = policy, dtype
        self._n_read = policy.budget_pages(storage.group, f"{storage} a smaller group")
        super().__init__(specs, storage, dtype, page_tokens, rollback_window, store, name)

    def _bound_fields(self, spec: AttentionSpec) -> tuple[Shaped, ...]:
        return (((spec.n_kv_heads, spec.head_dim), self._dtype),) * 2

    def _bounds(self, k_BGRD: Tensor) -> list[Tensor]:
        return [k_BGRD.amin(2), k_BGRD.amax(2)]

    def _plan_reads(self, plan: QuantizedPlan) -> GroupPlan:
        packed, group, n_groups = plan.packed, self.storage.group, np.diff(plan.cu_blocks)
        selects = (packed.counts <= self.policy.select_up_to) & (n_groups > self._n_read)
        chosen, others = selects.nonzero()[0], (~selects).nonzero()[0]
        tokens, rest_tokens = (ranges(packed.cu_seqlens[:-1][x], packed.cu_seqlens[1:][x]) for x in (chosen, others))
        request = np.repeat(chosen, packed.counts[chosen])
        begins, n = plan.cu_blocks[:-1][request], n_groups[request]
        n_last = np.maximum(0, n - np.maximum(0, packed.positions[tokens] + 1 - self.policy.recent) // group)
        blocks = plan.blocks[ranges(begins, begins + n)] // self._dtype.itemsize
        cu_chosen = np.arange(len(tokens) + 1) * self._n_read
        n_first = ceil_div(self.policy.sinks, group)
        choice = PageChoice(self._store.upload(blocks), starts_of(n), n_first, n_last, cu_chosen)
        rest_blocks = plan.blocks[ranges(plan.cu_blocks[:-1][others], plan.cu_blocks[1:][others])]
        if len(tokens):
            self._store.upload(rest_blocks)  # for kernels that want them on the device: they find them there
        return GroupPlan(
            **{f.name: getattr(plan, f.name) for f in fields(plan)}, choice=choice if len(tokens) else None,
            tokens=self._store.upload(tokens), chosen=self._exact_of(plan, request, tokens),
            chosen_lengths=np.full(len(tokens), self._n_read * group),
            rest=part_of(plan.exact, others, self.exact.place) if len(others) else None,
            rest_tokens=self._store.upload(rest_tokens), rest_blocks=rest_blocks,
            rest_cu_blocks=starts_of(n_groups[others]), rest_lengths=plan.lengths[others],
        )  # fmt: skip

    def _exact_of(self, plan: QuantizedPlan, request: Int64s, tokens: Int64s) -> PagedBatch:
        """The exact rows up to each of these tokens, of these requests."""
        batch = plan.exact.batch
        lengths = batch.kv_lengths[request] - (batch.cu_seqlens[1:][request] - 1 - tokens)
        begins, n_pages = batch.cu_pages[:-1][request], self.grid.pages(lengths)
        pages = self.exact.place(plan.exact.pages[ranges(begins, begins + n_pages)])
        return PagedBatch(np.arange(len(tokens) + 1), lengths, pages, starts_of(n_pages), batch.page_tokens)

    def begin(self, plan: QuantizedPlan) -> None:
        assert isinstance(plan, GroupPlan)
        super().begin(plan)
        if plan.choice is not None:
            self.exact.kernels.plan_choice(plan.choice, self._store.device)

    def _reads(self, plan: QuantizedPlan) -> list[Read]:
        assert isinstance(plan, GroupPlan)
        if plan.choice is None:
            return super()._reads(plan)
        # Which blocks are read is chosen later: here it matters how many.
        chosen = (plan.chosen, self._folded(0, plan.blocks, plan.choice.cu_chosen, plan.chosen_lengths))
        return [chosen] if plan.rest is None else [chosen, (plan.rest, self._folded_rest(plan, 0))]

    def _folded_rest(self, plan: GroupPlan, index: int) -> FoldedRows | None:
        return self._folded(index, plan.rest_blocks, plan.rest_cu_blocks, plan.rest_lengths) if len(plan.rest_blocks) else None

    def _read(self, plan: QuantizedPlan, index: int, q_THD: Tensor, scoring: Scoring) -> Tensor:
        assert isinstance(plan, GroupPlan)
        if plan.choice is None:
            return super()._read(plan, index, q_THD, scoring)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        if plan.rest is not None:
            exact, tokens = replace(plan.exact, batch=plan.rest), plan.rest_tokens
            out_THD[tokens] = self.exact.read(exact, index, q_THD[tokens], scoring, self._folded_rest(plan, index))
        q_QHD, (least, greatest) = q_THD[plan.tokens], self._flats[index][-2:]
        places_GC = self.exact.kernels.choose_pages(q_QHD, least, greatest, plan.choice, self._specs[index].n_kv_heads)
        folded = self._folded(index, places_GC * self._dtype.itemsize, plan.choice.cu_chosen, plan.chosen_lengths)
        out_THD[plan.tokens] = self.exact.read(replace(plan.exact, batch=plan.chosen), index, q_QHD, scoring, folded)
        return out_THD

    def can_record(self, plan: QuantizedPlan) -> bool:
        assert isinstance(plan, GroupPlan)
        return plan.choice is None and super().can_record(plan)  # from how many groups is chosen, is counted on the host
