"""Measures a decode step of delta rules: a decay for each key channel (Kimi) beside one for each head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.harness import Report, interleave
from hybridmem.memory import HybridMemory, MemorySpec
from hybridmem.memory.recurrences import DeltaRule, DeltaRuleShape
from hybridmem.memory.recurrences.convolution import CausalConv

N_LAYERS = 24
"""States of so many layers do not stay in a processor's last-level cache from step to step."""
_N_HEADS, _SIZE = 32, 128


def delta_rules(*, quick: bool) -> Report:
    """Measure a decode step of delta rules: a decay for each key channel beside one for each head.

    One sequence and several are measured: whole steps of a memory, with convolutions, norms and books.
    """
    report = Report("delta_rules")
    for n_sequences in (1,) if quick else (1, 8):
        runs = {kind: _steps(n_sequences, decays_keys=kind == "kimi_delta") for kind in ("gated_delta", "kimi_delta")}
        samples = interleave(runs, 20 if quick else 60, n_warm_up=3)
        for kind in runs:
            report.add("decode steps of delta rules, 32 heads of 128 x 128", {
                "recurrence": kind, "sequences": n_sequences, "µs a layer": samples[kind].median_ms * 1e3 / N_LAYERS,
                "of gated_delta": samples[kind].median_ms / samples["gated_delta"].median_ms,
            })  # fmt: skip
    report.notes.append(
        "Delta rules: one with a decay for each key channel is asked to take at most 1.3 of gated delta."
    )
    return report


def _steps(n_sequences: int, *, decays_keys: bool) -> Callable[[], None]:
    shape = DeltaRuleShape(_N_HEADS, _N_HEADS, _SIZE, _SIZE, 4, decays_keys=decays_keys)
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(1))
    rates = -randn(shape.n_decays).exp() / 4
    rule = DeltaRule(shape, CausalConv(0.3 * randn(4, shape.n_channels)), randn(shape.n_decays), rates)
    spec = MemorySpec(((shape.spec(),),) * N_LAYERS, 2)
    memory = HybridMemory(spec, "2GiB", rollback_window=0)
    sequences, rows = [memory.open() for _ in range(n_sequences)], randn(n_sequences, *shape.spec().row_shape)
    rows[:, shape.n_channels : shape.n_channels + _N_HEADS].sigmoid_()

    def run() -> None:
        with memory.step({sequence: [0] for sequence in sequences}) as step:
            for layer in range(N_LAYERS):
                step.recur(layer, rows, rule)

    return run
