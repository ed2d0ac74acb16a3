"""Computes how many sequences of a length fit into a budget, by feeding one to a dry run of the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hybridmem.memory.blocks.arguments import read_count
from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.blocks.layout import ALIGNMENT_BYTES
from hybridmem.memory.errors import SpecError
from hybridmem.memory.eviction import EvictionPolicy
from hybridmem.memory.hybrid import HybridMemory
from hybridmem.memory.interface import Encoded
from hybridmem.memory.specs import AttentionSpec, CrossAttentionSpec, MemorySpec

_ROOM_BYTES = 1 << 61
"""Budget of the dry run: more than any sequence takes."""


@dataclass(frozen=True)
class SequencePlan:
    """Says how many bytes a sequence takes that grows to `n_tokens`: a capacity plan.

    Attributes:
        most_bytes: that it holds between two steps, at any length up to `n_tokens`.
        most_at: a length at which it holds them.
        by_kind, block_bytes: at that length, as `Usage` has them; by_kind's values sum to `most_bytes`.
        step_bytes: that the steps of a prompt of `n_tokens` take on top of `most_bytes`, until blocks that they replace
            are given back.
        least_bytes: a memory of this kind is not made with less.
    """

    n_tokens: int
    page_tokens: int
    most_bytes: int
    most_at: int
    by_kind: dict[str, int]
    block_bytes: dict[str, int]
    step_bytes: int
    least_bytes: int

    def fit_into(self, budget_bytes: int) -> int:
        """Return how many such sequences fit into a budget at once, between steps; 0 if not even one can be fed."""
        usable = budget_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return usable // self.most_bytes if usable >= max(self.most_bytes + self.step_bytes, self.least_bytes) else 0


def plan_sequence(
    spec: MemorySpec,
    n_tokens: int,
    *,
    page_tokens: int = 16,
    step_tokens: int = 512,
    encoder_tokens: int = 0,
    **options: Any,
) -> SequencePlan:
    """Compute the bytes of a sequence of up to `n_tokens` in a memory of `spec`, without tensors, to the byte.

    What a sequence holds follows from its length, not from the steps that led there, so all but its last tokens are fed
    at once. It may hold more a little before its end than at its end: old rows fold in groups, and a state at the next
    fold point is both head and next body.

    Args:
        step_tokens: of a prompt's steps: `max_tokens` of `HybridMemory.run`; of its grid with policies or storages.
        encoder_tokens: rows that the encoder of an encoder-decoder model returns for each sequence's input.
        options: of `HybridMemory`: rollback_window, fold, dtype, state_dtype. Bytes are those on the spec's device.
    Raises:
        SpecError: an option that cannot work, as `HybridMemory`.
    Cost: O(n_tokens); for a million, in pages of 16, 0.7 s.
    """
    if not isinstance(spec, MemorySpec):
        raise SpecError(f"{spec!r} is no MemorySpec; pass model.memory_spec")
    n_tokens, step_tokens = read_count("n_tokens", n_tokens, 1), read_count("step_tokens", step_tokens, 1)
    encoder_tokens = read_count("encoder_tokens", encoder_tokens, 0)

    def feed(ends: Iterable[int]) -> Iterator[tuple[HybridMemory, int, int]]:
        """Feed a sequence in its own memory up to each of `ends`; yield memory, length and bytes used in the step."""
        memory = HybridMemory(spec, _ROOM_BYTES, device="meta", page_tokens=page_tokens, **options)
        sequence = memory.open(encoder=_encoded(spec, encoder_tokens))
        for end in ends:
            with memory.step({sequence: np.zeros(end - sequence.length, np.int64)}):
                in_step_bytes = memory.counters.used_bytes
            yield memory, end, in_step_bytes

    n_single = min(n_tokens, _lengths_that_differ(spec, page_tokens))
    most_bytes = most_at = 0
    for memory, length, _ in feed(range(max(1, n_tokens - n_single), n_tokens + 1)):
        if memory.counters.used_bytes > most_bytes:
            most_bytes, most_at, usage = memory.counters.used_bytes, length, memory.usage()
    n_stepped = 2 * max(memory.rollback_window, n_single) + 2 * step_tokens
    first = max(0, n_tokens - n_stepped) // step_tokens * step_tokens  # `HybridMemory.run` cuts prompts there
    ends = [*([first] if first else []), *range(first + step_tokens, n_tokens, step_tokens), n_tokens]
    peak_bytes = max(in_step_bytes for _, length, in_step_bytes in feed(ends) if length > first)
    step_bytes = max(0, peak_bytes - most_bytes)
    least_bytes = memory.counters.least_bytes
    return SequencePlan(
        n_tokens, page_tokens, most_bytes, most_at, usage.by_kind, usage.block_bytes, step_bytes, least_bytes
    )


def checkpoint_bytes(
    spec: MemorySpec, *, holds_tail: bool = False, page_tokens: int = 16, encoder_tokens: int = 0, **options: Any
) -> int:
    """Compute the bytes that a checkpoint adds once its sequence has gone on by more than a rollback window.

    Args:
        holds_tail: as `HybridMemory.checkpoint` has it.
        page_tokens, encoder_tokens, options: as `plan_sequence` has them.
    Raises SpecError: an option that cannot work. Cost: milliseconds.
    """
    memory = HybridMemory(spec, _ROOM_BYTES, device="meta", page_tokens=page_tokens, **options)
    sequence = memory.open(encoder=_encoded(spec, encoder_tokens))
    n_apart = 512 * ceil_div(2 * memory.rollback_window + page_tokens, 512)  # policies and storages fold within these
    memory.run(None, {sequence: np.zeros(n_apart + memory.rollback_window // 2 + 1, np.int64)})
    checkpoint = memory.checkpoint(sequence, holds_tail=holds_tail)
    memory.run(None, {sequence: np.zeros(n_apart, np.int64)})
    return memory.private_bytes(checkpoint)


def _lengths_that_differ(spec: MemorySpec, page_tokens: int) -> int:
    """Return at how many last lengths to look for the largest: rows fold in groups, and states change roles."""
    attention = [m for layer in spec.layers for m in layer if isinstance(m, AttentionSpec)]
    groups = [m.storage.group for m in attention if m.storage is not None]
    every = [m.policy.every for m in attention if isinstance(m.policy, EvictionPolicy)]
    return max(page_tokens, *groups, *every, 1) + 1


def _encoded(spec: MemorySpec, n_rows: int) -> Encoded | None:
    """Return an encoder's output without data, None for a model without an encoder. Raises SpecError."""
    cross = [m for _, m in spec.of_kind("cross-attention") if isinstance(m, CrossAttentionSpec)]
    if bool(cross) != bool(n_rows):
        why = (
            "has an encoder; say how many rows its output has" if cross else "has no encoder; leave encoder_tokens out"
        )
        raise SpecError(f"encoder_tokens={n_rows}: {spec.model} {why}")
    rows = [torch.empty(n_rows, m.n_kv_heads, m.head_dim, dtype=spec.dtype, device="meta") for m in cross]
    return [(r, r) for r in rows] if cross else None
