"""Measures a decode step of attention that reads the rows an index chooses, beside dense attention over all rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.harness import Report, interleave
from hybridmem.memory import AttentionSpec, ChosenRows, HybridMemory, IndexSpec, MemorySpec, Sequence
from hybridmem.memory.recurrences import CausalConv, GatedPool, ShortConv, gated_pool_spec, short_conv_spec
from hybridmem.memory.specs import RecurrentSpec
from tests.inside import store_of


@dataclass(frozen=True)
class Case:
    """Holds a layer of attention and its index.

    Attributes:
        spans: the recurrence that makes the key of a span of tokens, and its spec; None where each token has a key.
    """

    attention: AttentionSpec
    index: IndexSpec
    spans: tuple[RecurrentSpec, GatedPool | ShortConv] | None = None


_SPAN, _N_CHOSEN, _N_KEY = "span", 2048, 128
_LATENT = partial(AttentionSpec, n_kv_heads=1, value_dim=512, n_chosen=_N_CHOSEN)

LAYERS = {
    "DeepSeek-V3.2: 128 heads, latents of 576": Case(_LATENT(128, head_dim=576), IndexSpec(64, _N_KEY, _N_CHOSEN)),
    "GLM-5: 64 heads, latents of 576": Case(_LATENT(64, head_dim=576), IndexSpec(32, _N_KEY, _N_CHOSEN)),
    "GLM-5.3: 64 heads, latents of 512, spans of 4": Case(
        _LATENT(64, head_dim=512, span_tokens=4),
        IndexSpec(32, _N_KEY, _N_CHOSEN, span_tokens=4),
        (gated_pool_spec(_N_KEY, 4, _SPAN), GatedPool(torch.zeros(4, _N_KEY))),
    ),
    "Qwen4-Exp: 16 heads on 2 of 256, spans of 16": Case(
        AttentionSpec(16, 2, 256, n_chosen=_N_CHOSEN, span_tokens=16),
        IndexSpec(16, _N_KEY, _N_CHOSEN, span_tokens=16),
        (
            short_conv_spec(_N_KEY, 16, _SPAN),
            ShortConv(CausalConv(torch.full((16, _N_KEY), 1 / 16), activation=False)),
        ),
    ),
}
_AT_ONCE = 20_000
_ITEM_BYTES = 4


class _Layer:
    """Holds a layer with its memory and a sequence of `n_tokens` random rows. A step adds a token and takes it back."""

    def __init__(self, case: Case, n_tokens: int, *, has_index: bool) -> None:
        randn = partial(torch.randn, generator=torch.Generator().manual_seed(1))
        attention, index = case.attention, case.index
        self.spans = case.spans if has_index else None
        rows = (attention, index) if has_index else (replace(attention, n_chosen=None, span_tokens=1),)
        specs = (*rows, *(() if self.spans is None else self.spans[:1]))
        # What a span remembers of its last tokens takes less than the rows of 640 tokens.
        budget = (n_tokens + 640) * sum(_row_bytes(one) for one in rows)
        self.memory = HybridMemory(MemorySpec((specs,), 2), budget, rollback_window=1)
        self.sequence = self._filled(n_tokens)
        self.q = randn(1, attention.n_query_heads, attention.head_dim)
        self.k = randn(1, attention.n_kv_heads, attention.head_dim)
        self.v = None if attention.value_dim is not None else randn(1, attention.n_kv_heads, attention.head_dim)
        self.index_q, self.index_k = randn(1, index.n_query_heads, index.head_dim), randn(1, 1, index.head_dim)
        self.weights, self.has_index = randn(1, index.n_query_heads), has_index
        if self.spans is not None:
            self.span_rows = randn(1, *self.spans[0].row_shape)

    def _filled(self, n_tokens: int) -> Sequence:
        generator = torch.Generator().manual_seed(2)
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
            k_T1D = self.index_k
            if self.spans is not None:
                k_T1D = step.recur(0, self.span_rows, self.spans[1], name=_SPAN)[:, None]
            chosen = step.choose(0, self.index_q, k_T1D, self.weights) if self.has_index else None
            step.attend(0, self.q, self.k, self.v, chosen=chosen)
            step.accept({self.sequence: 0})
        return chosen


def indexed(*, quick: bool) -> Report:
    """Measure a decode step of attention that reads the rows an index chooses, beside dense attention.

    One sequence is measured in float32. The step of a layer is all that the memory does: books, writes and reads.
    """
    report, lengths = Report("indexed"), (4_000, 20_000) if quick else (10_000, 30_000, 100_000)
    for name, case in LAYERS.items():
        for n_tokens in lengths:
            report.add("a decode step of a layer", {"layer": name, "tokens": n_tokens} | _row(case, n_tokens))
    report.notes.append(
        "Asked at 100,000 tokens: 5 times faster. Bytes are those of keys and rows that a step reads. Where spans of "
        "tokens have one key, the step makes that key as well. Chosen as in plain torch: the share of chosen rows, or "
        "of spans, that the formula in plain torch chooses too; sums are rounded in another order."
    )
    return report


def _row_bytes(spec: AttentionSpec | IndexSpec) -> int:
    """Return the bytes that a token takes, at most: a span of tokens has one key."""
    n_heads, size = spec.kv_shape
    return spec.n_parts * n_heads * size * _ITEM_BYTES


def _row(case: Case, n_tokens: int) -> dict[str, str | int | float]:
    layer, dense = (_Layer(case, n_tokens, has_index=has_index) for has_index in (True, False))
    runs: dict[str, Callable[[], object]] = {"indexed": layer.step, "dense": dense.step}
    samples = interleave(runs, 15, n_warm_up=2)
    row_bytes = _row_bytes(case.attention)
    n_read_bytes = n_tokens // case.index.span_tokens * _row_bytes(case.index) + case.index.n_chosen * row_bytes
    return {
        "MB, indexed": n_read_bytes / 1e6, "MB, dense": n_tokens * row_bytes / 1e6,
        "ms, indexed": samples["indexed"].median_ms, "ms, dense": samples["dense"].median_ms,
        "times faster": samples["dense"].median_ms / samples["indexed"].median_ms,
        "chosen as in plain torch": _agreement(case, n_tokens),
    }  # fmt: skip


def _agreement(case: Case, n_tokens: int) -> float:
    """Compare the rows that this device's kernels choose with those of plain torch, on the same bytes."""
    found = []
    before = os.environ.get("HYBRID_MEMORY_KERNELS")
    for kernels in (before, "reference"):
        if kernels is not None:
            os.environ["HYBRID_MEMORY_KERNELS"] = kernels
        chosen = _Layer(case, n_tokens, has_index=True).step()
        assert chosen is not None and chosen.positions is not None
        found.append(set(chosen.positions.tolist()))
    os.environ.pop("HYBRID_MEMORY_KERNELS")
    if before is not None:
        os.environ["HYBRID_MEMORY_KERNELS"] = before
    return len(found[0] & found[1]) / len(found[0])
