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
from hybridmem.memory.sequences.chunks import GRID_TOKENS
from hybridmem.memory.specs import AttentionSpec, CrossAttentionSpec, MemorySpec

_ROOM_BYTES = 1 << 61
"""The budget of the dry run, which no sequence exceeds."""


@dataclass(frozen=True)
class SequencePlan:
    """Says how many bytes a sequence takes while it grows to `n_tokens`: a capacity plan.

    Attributes:
        most_bytes: the most bytes that the sequence holds between two steps, at any length up to `n_tokens`.
        most_at: a length at which the sequence holds `most_bytes`.
        by_kind, block_bytes: the fields of `Usage` at that length. The values of `by_kind` sum to `most_bytes`.
        step_bytes: how many bytes the steps of a prompt of `n_tokens` need on top of `most_bytes`, because a step's new
            blocks and the blocks that they replace exist together until the step ends.
        least_bytes: the smallest budget with which a memory of this spec can be made.
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
        """Return how many such sequences fit into a budget at once, between steps.

        It is 0 if not even one can be fed.
        """
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
    """Compute exactly how many bytes a sequence of up to `n_tokens` takes in a memory of `spec`, without tensors.

    What a sequence holds follows from its length, not from the steps that led there. So all tokens but the last ones
    are fed at once. The maximum may come a little before the end, because old rows fold in groups, and because one
    state may serve both as the head and as the next body when the head is at a fold point.

    Args:
        step_tokens: how many tokens of a prompt each step takes, like `max_tokens` of `HybridMemory.run`. With policies
            or storages it is at least 512, the distance of the grid.
        encoder_tokens: rows that the encoder of an encoder-decoder model returns for each sequence's input.
        options: arguments of `HybridMemory`: rollback_window, fold, dtype, state_dtype. Bytes are counted for the
            spec's device.
    Raises:
        SpecError: an option cannot work, as in `HybridMemory`.
    Cost: O(n_tokens). A million tokens in pages of 16 take 0.7 s.
    """
    if not isinstance(spec, MemorySpec):
        raise SpecError(f"{spec!r} is no MemorySpec; pass model.memory_spec")
    n_tokens, step_tokens = read_count("n_tokens", n_tokens, 1), read_count("step_tokens", step_tokens, 1)
    encoder_tokens = read_count("encoder_tokens", encoder_tokens, 0)

    def feed(ends: Iterable[int]) -> Iterator[tuple[HybridMemory, int, int]]:
        """Feed a sequence in a memory of its own, up to each position in `ends`.

        Yield the memory, the sequence's length, and the bytes in use during the step.
        """
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
    first = max(0, n_tokens - n_stepped) // step_tokens * step_tokens  # `HybridMemory.run` cuts prompts here.
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
    """Compute the bytes that a checkpoint adds once its sequence is more than a rollback window ahead of it.

    Args:
        holds_tail: the argument of `HybridMemory.checkpoint`.
        page_tokens, encoder_tokens, options: the arguments of `plan_sequence`.
    Raises SpecError if an option cannot work. Cost: milliseconds.
    """
    memory = HybridMemory(spec, _ROOM_BYTES, device="meta", page_tokens=page_tokens, **options)
    sequence = memory.open(encoder=_encoded(spec, encoder_tokens))
    # The distance is larger than the longest fold of any policy or storage.
    n_apart = GRID_TOKENS * ceil_div(2 * memory.rollback_window + page_tokens, GRID_TOKENS)
    memory.run(None, {sequence: np.zeros(n_apart + memory.rollback_window // 2 + 1, np.int64)})
    checkpoint = memory.checkpoint(sequence, holds_tail=holds_tail)
    memory.run(None, {sequence: np.zeros(n_apart, np.int64)})
    return memory.private_bytes(checkpoint)


def _lengths_that_differ(spec: MemorySpec, page_tokens: int) -> int:
    """Return how many of the last lengths must be tried to find the one that takes the most bytes.

    Bytes do not grow evenly with the length, because rows fold in groups, and states change roles.
    """
    attention = [m for layer in spec.layers for m in layer if isinstance(m, AttentionSpec)]
    groups = [m.storage.group for m in attention if m.storage is not None]
    every = [m.policy.every for m in attention if isinstance(m.policy, EvictionPolicy)]
    return max(page_tokens, *groups, *every, 1) + 1


def _encoded(spec: MemorySpec, n_rows: int) -> Encoded | None:
    """Return an encoder's output as tensors without data, or None for a model without an encoder. Raises SpecError."""
    cross = [m for _, m in spec.of_kind("cross-attention") if isinstance(m, CrossAttentionSpec)]
    if bool(cross) != bool(n_rows):
        why = (
            "has an encoder; say how many rows its output has" if cross else "has no encoder; leave encoder_tokens out"
        )
        raise SpecError(f"encoder_tokens={n_rows}: {spec.model} {why}")
    rows = [torch.empty(n_rows, m.n_kv_heads, m.head_dim, dtype=spec.dtype, device="meta") for m in cross]
    return [(r, r) for r in rows] if cross else None
