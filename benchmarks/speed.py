"""Measures prefill and decode beside transformers and beside a step without mixers, by context and by batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from benchmarks.ceilings import report_ceilings
from benchmarks.harness import Report, interleave
from benchmarks.ours import N_UNTIMED, Ours, draw, workload
from benchmarks.workloads import MODELS, Mixerless, Transformers, both_models
from hybridmem.memory import RecurrentSpec, Step
from hybridmem.models import LanguageModel

ASKED = {
    ("jamba", "1 x 512"): 3.5, ("mamba", "1 x 512"): 4.5, ("jamba", "32 x 64"): 2.5, ("mamba", "32 x 64"): 4.0,
    ("jamba", 1): 1.5, ("mamba", 1): 1.8, ("jamba", 8): 2.3, ("mamba", 8): 3.0, ("jamba", 32): 2.3, ("mamba", 32): 2.7,
    ("mamba2", "1 x 512"): 3.0, ("mamba2", "32 x 64"): 12.0, ("mamba2", 1): 2.4, ("mamba2", 8): 4.0,
    ("mamba2", 32): 4.5, ("bamba", "1 x 512"): 1.8, ("bamba", "32 x 64"): 4.0, ("bamba", 1): 1.5, ("bamba", 8): 3.0,
    ("bamba", 32): 3.3, ("qwen3_5", 1): 1.6, ("qwen3_5", 8): 3.0, ("qwen3_5", 32): 3.3, ("lfm2", "1 x 512"): 1.0,
    ("lfm2", "32 x 64"): 1.0, ("lfm2", 1): 1.0, ("lfm2", 8): 1.0, ("lfm2", 32): 1.0,
}  # fmt: skip
"""Ratios that this project wants at least."""


_SLOW = ("mamba2", "bamba")
"""Models of which transformers takes up to a minute for the larger prompts."""


_GROWING = ("jamba", "mamba")
"""Models that are measured against context and batch: one with attention, one without."""


def prefill(*, quick: bool, models: Sequence[str] = MODELS) -> Report:
    report = Report("prefill")
    for name in models:
        with both_models(name) as (model, peer):
            for n_sequences, n_tokens in ((1, 128), (8, 16)) if quick else ((1, 512), (32, 64)):
                tokens, ours, theirs = draw(n_sequences, n_tokens), Ours(model, n_sequences), Transformers(peer)
                runs = {"ours": lambda: ours.prefill(tokens), "transformers": lambda: theirs.prefill(tokens)}  # noqa: B023
                times = interleave(runs, 2 if quick else 3 if name in _SLOW else 5)
                work = f"{n_sequences} x {n_tokens}"
                report.add("prefill, ms", {
                    "model": name, "sequences x tokens": work, "ours": times["ours"].median_ms,
                    "spread": times["ours"].spread, "transformers": times["transformers"].median_ms,
                    "their spread": times["transformers"].spread,
                    "ratio": times["transformers"].median_ms / times["ours"].median_ms,
                    "asked": ASKED.get((name, work), "-"),
                })  # fmt: skip
    return report


def decode(*, quick: bool, models: Sequence[str] = MODELS, plot: Path | None = None) -> Report:
    report = Report("decode")
    report_ceilings(report, quick=quick)
    for name in models:
        with both_models(name) as (model, peer):
            for n_sequences, n_tokens in workload(quick=quick):
                _against_transformers(report, name, model, Transformers(peer), n_sequences, n_tokens, quick=quick)
            del peer
            for n_sequences in (8,) if quick else (1, 8, 32):
                _against_the_ceiling(report, name, model, n_sequences, quick=quick)
            for n_sequences in (4,) if quick else (1, 8, 32):
                _window(report, name, model, n_sequences, quick=quick)
            if not quick and name in _GROWING:
                _growth(report, name, model)
    if plot is not None and "growth, ms a step" in report.tables:
        plot_growth(report, plot)
    return report


def _against_transformers(
    report: Report,
    name: str,
    model: LanguageModel,
    theirs: Transformers,
    n_sequences: int,
    n_tokens: int,
    *,
    quick: bool,
) -> None:
    tokens, ours = draw(n_sequences, n_tokens), Ours(model, n_sequences)
    ours.fill(tokens)
    theirs.prefill(tokens)
    times = interleave({"ours": ours.decode, "transformers": theirs.decode}, 5 if quick else 40, n_warm_up=N_UNTIMED)
    report.add("decode, ms a step", {
        "model": name, "sequences": n_sequences, "after": n_tokens, "ours": times["ours"].median_ms,
        "spread": times["ours"].spread, "transformers": times["transformers"].median_ms,
        "their spread": times["transformers"].spread,
        "ratio": times["transformers"].median_ms / times["ours"].median_ms,
        "asked": ASKED.get((name, n_sequences), "-"),
    })  # fmt: skip


def _against_the_ceiling(report: Report, name: str, model: LanguageModel, n_sequences: int, *, quick: bool) -> None:
    """Measure steps with and without mixers. Without mixers nothing is remembered, so neither step is recorded."""
    ours = Ours(model, n_sequences, records=False)
    ours.fill(draw(n_sequences, 128 if quick else 512))
    bare = cast(Step, Mixerless(torch.full((n_sequences,), 5)))
    times = interleave({"whole": ours.decode, "ceiling": lambda: model(bare)}, 9 if quick else 60, n_warm_up=3)
    whole, ceiling = times["whole"].median_ms, times["ceiling"].median_ms
    report.add("a step and its ceiling, neither recorded, ms", {
        "model": name, "sequences": n_sequences, "whole step": whole, "without mixers": ceiling,
        "mixers": whole - ceiling, "ratio": whole / ceiling, "asked": 1.35
    })  # fmt: skip


def _window(report: Report, name: str, model: LanguageModel, n_sequences: int, *, quick: bool) -> None:
    """Measure decoding with a rollback window and without, over whole ring buffers and at staggered lengths.

    The report has means, because bodies move only in some steps.
    """
    subjects = {window: Ours(model, n_sequences, rollback_window=window) for window in (0, 32)}
    for ours in subjects.values():
        for i, sequence in enumerate(ours.sequences):
            ours.memory.run(model, {sequence: [3] * (64 + i)}, max_tokens=2048)
    n_steps = 8 if quick else 128
    times = interleave(
        {str(window): ours.decode for window, ours in subjects.items()}, n_steps, n_warm_up=2 if quick else 66
    )
    usage = subjects[32].memory.usage()
    row_elements = sum(
        math.prod(m.row_shape) for layer in model.memory_spec.layers for m in layer if isinstance(m, RecurrentSpec)
    )
    expected = n_sequences * (2 * 32 - 1) * row_elements * model.memory_spec.dtype.itemsize
    report.add("rollback_window=32 against 0, ms a step", {
        "model": name, "sequences": n_sequences, "without": times["0"].mean_ms, "with": times["32"].mean_ms,
        "ratio of means": times["32"].mean_ms / times["0"].mean_ms,
        "of medians": times["32"].median_ms / times["0"].median_ms, "asked": 1.05,
        "tails, MiB": usage.by_kind["tails"] / 2**20, "of 63 rows, MiB": expected / 2**20,
        "states a sequence": usage.by_kind["states"] / usage.block_bytes["states"] / n_sequences,
    })  # fmt: skip


def _growth(report: Report, name: str, model: LanguageModel) -> None:
    """Measure decode time by context length (of eight sequences) and by number of sequences (of 256 tokens each)."""
    by_context = {}
    for n_tokens in (512, 2048, 8192):
        ours = Ours(model, 8)
        ours.fill(draw(8, n_tokens))
        by_context[f"8 x {n_tokens}"] = ours
    for key, samples in interleave(
        {key: ours.decode for key, ours in by_context.items()}, 20, n_warm_up=N_UNTIMED
    ).items():
        report.add(
            "growth, ms a step",
            {"model": name, "sequences x context": key, "median": samples.median_ms, "spread": samples.spread},
        )
    by_context.clear()
    by_batch = {}
    for n_sequences in (1, 2, 4, 8, 16, 32, 64):
        ours = Ours(model, n_sequences, budget="2GiB")
        ours.fill(draw(n_sequences, 256))
        by_batch[f"{n_sequences} x 256"] = ours
    for key, samples in interleave(
        {key: ours.decode for key, ours in by_batch.items()}, 20, n_warm_up=N_UNTIMED
    ).items():
        report.add(
            "growth, ms a step",
            {"model": name, "sequences x context": key, "median": samples.median_ms, "spread": samples.spread},
        )


def plot_growth(report: Report, path: Path) -> None:
    """Plot time against context and against sequences. Needs matplotlib (the `notebooks` extra)."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        report.notes.append('No plot: matplotlib is not installed (`pip install -e ".[notebooks]"`).')
        return
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    rows = [
        (str(r["model"]), *map(int, str(r["sequences x context"]).split(" x ")), float(r["median"]))
        for r in report.tables["growth, ms a step"]
    ]
    for name in dict.fromkeys(row[0] for row in rows):
        own = [row for row in rows if row[0] == name]
        by_context = sorted((n_tokens, ms) for _, n, n_tokens, ms in own if n_tokens != 256)
        by_batch = sorted((n, ms) for _, n, n_tokens, ms in own if n_tokens == 256)
        for panel, points in zip(panels, (by_context, by_batch), strict=True):
            panel.plot(*zip(*points, strict=True), marker="o", label=name)
    for panel, label in zip(panels, ("tokens of context, 8 sequences", "sequences, 256 tokens each"), strict=True):
        panel.set(xlabel=label, ylabel="ms a decode step", ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
