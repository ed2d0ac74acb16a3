"""Measures a decode step of attention that reads the rows an index chooses, beside dense attention over all rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.harness import Report, interleave
from hybridmem.memory import AttentionSpec, ChosenRows, HybridMemory, IndexSpec, MemorySpec, Sequence
from tests.inside import store_of

LAYERS: dict[str, tuple[AttentionSpec, IndexSpec]] = {
    "DeepSeek-V3.2: 128 heads, latents of 576": (
        AttentionSpec(128, 1, 576, value_dim=512, n_chosen=2048), IndexSpec(64, 128, 2048),
    ),
    "GLM-5: 64 heads, latents of 576": (
        AttentionSpec(64, 1, 576, value_dim=512, n_chosen=2048), IndexSpec(32, 128, 2048),
    ),
}  # fmt: skip
_AT_ONCE = 20_000
_ITEM_BYTES = 4


class _Layer:
    """Holds a layer with its memory and a sequence of `n_tokens` random rows. A step adds a token and takes it back."""

    def __init__(self, attention: AttentionSpec, index: IndexSpec | None, n_tokens: int) -> None:
        generator = torch.Generator().manual_seed(1)
        specs = (attention,) if index is None else (attention, index)
        row_bytes = sum(m.kv_shape[1] for m in specs) * _ITEM_BYTES
        self.memory = HybridMemory(MemorySpec((specs,), 2), (n_tokens + 640) * row_bytes, rollback_window=1)
        self.sequence = self._filled(n_tokens, generator)
        self.q = torch.randn(1, attention.n_query_heads, attention.head_dim, generator=generator)
        self.k = torch.randn(1, 1, attention.head_dim, generator=generator)
        if (heads := index) is not None:
            self.index_q = torch.randn(1, heads.n_query_heads, heads.head_dim, generator=generator)
            self.index_k = torch.randn(1, 1, heads.head_dim, generator=generator)
            self.weights = torch.randn(1, heads.n_query_heads, generator=generator)
        self.has_index = index is not None

    def _filled(self, n_tokens: int, generator: torch.Generator) -> Sequence:
        sequence, places = self.memory.open(), None
        while sequence.length < n_tokens:  # To choose rows for each of these tokens would take hours.
            with self.memory.step({sequence: [0] * min(_AT_ONCE, n_tokens - sequence.length)}) as step:
                places = places or frozenset(step.owner.places)
                step.serve(places)
        for group in self.memory.counters.inventory().groups:
            for _, layout in group.pools:
                # All pages lie in one arena, so that this fills those of other pools as well.
                store_of(self.memory).flat(layout.fields[0]).normal_(generator=generator)
        return sequence

    def step(self) -> ChosenRows | None:
        with self.memory.step({self.sequence: [0]}) as step:
            chosen = step.choose(0, self.index_q, self.index_k, self.weights) if self.has_index else None
            step.attend(0, self.q, self.k, chosen=chosen)
            step.accept({self.sequence: 0})
        return chosen


def indexed(*, quick: bool) -> Report:
    """Measure a decode step of attention that reads the rows an index chooses, beside dense attention.

    One sequence is measured in float32. The step of a layer is all that the memory does: books, writes and reads.
    """
    report, lengths = Report("indexed"), (4_000, 20_000) if quick else (10_000, 30_000, 100_000)
    for name, (attention, index) in LAYERS.items():
        for n_tokens in lengths:
            report.add(
                "a decode step of a layer", {"layer": name, "tokens": n_tokens} | _row(attention, index, n_tokens)
            )
    report.notes.append(
        "Asked at 100,000 tokens: 5 times faster. Bytes are those of keys and rows that a step reads. Chosen as in "
        "plain torch: the share of chosen rows that the formula in plain torch chooses too; sums are rounded in "
        "another order."
    )
    return report


def _row(attention: AttentionSpec, index: IndexSpec, n_tokens: int) -> dict[str, str | int | float]:
    layer, dense = _Layer(attention, index, n_tokens), _Layer(replace(attention, n_chosen=None), None, n_tokens)
    runs: dict[str, Callable[[], object]] = {"indexed": layer.step, "dense": dense.step}
    samples = interleave(runs, 15, n_warm_up=2)
    n_read = n_tokens * index.head_dim + index.n_chosen * attention.head_dim
    return {
        "MB, indexed": n_read * _ITEM_BYTES / 1e6, "MB, dense": n_tokens * attention.head_dim * _ITEM_BYTES / 1e6,
        "ms, indexed": samples["indexed"].median_ms, "ms, dense": samples["dense"].median_ms,
        "times faster": samples["dense"].median_ms / samples["indexed"].median_ms,
        "chosen as in plain torch": _agreement(attention, index, n_tokens),
    }  # fmt: skip


def _agreement(attention: AttentionSpec, index: IndexSpec, n_tokens: int) -> float:
    """Compare the rows that this device's kernels choose with those of plain torch, on the same bytes."""
    found = []
    before = os.environ.get("HYBRID_MEMORY_KERNELS")
    for kernels in (before, "reference"):
        if kernels is not None:
            os.environ["HYBRID_MEMORY_KERNELS"] = kernels
        chosen = _Layer(attention, index, n_tokens).step()
        assert chosen is not None and chosen.positions is not None
        found.append(set(chosen.positions.tolist()))
    os.environ.pop("HYBRID_MEMORY_KERNELS")
    if before is not None:
        os.environ["HYBRID_MEMORY_KERNELS"] = before
    return len(found[0] & found[1]) / len(found[0])
