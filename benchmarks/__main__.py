"""`python -m benchmarks rollback`: what going back costs, on dry memories, so that only bookkeeping is timed.

Prints a table and, with `--json FILE`, writes the figures with the machine and the versions they were measured on.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from memory import AttentionSpec, HybridMemory, MemorySpec, Sequence
from memory.recurrences import mamba1_spec

app = typer.Typer(add_completion=False)
WINDOW = 32


@app.callback()
def benchmarks() -> None:
    """Measured, never asserted: these machines are noisy."""


def make_memory(n_layers: int) -> HybridMemory:
    """A quarter of the layers are attention, the others Mamba-1."""
    attention, mamba = AttentionSpec(12, 4, 64), mamba1_spec(1536, 16, 4)
    layers = tuple((attention if i % 4 == 2 else mamba,) for i in range(n_layers))
    return HybridMemory(MemorySpec(layers, 32000, device=torch.device("meta")), "64GiB", rollback_window=WINDOW)


def median_us(prepare: Callable[[], Sequence], timed: Callable[[Sequence], object], n_repeats: int) -> float:
    """Median time of `timed` on what `prepare` makes, in microseconds."""
    samples = []
    for _ in range(n_repeats):
        sequence = prepare()
        started = time.perf_counter_ns()
        timed(sequence)
        samples.append((time.perf_counter_ns() - started) / 1000)
    return statistics.median(samples)


@app.command()
def rollback(quick: bool = False, json_file: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    """Rollback by k tokens, fork, checkpoint and reorder, against k, layers and context."""
    rows = []
    for n_layers in (4, 12, 48):
        for n_context in (1024, 16384):
            memory = make_memory(n_layers)
            base = memory.open()
            memory.run(None, {base: [1] * n_context}, max_tokens=4096)
            for k in (1, 8, 32):
                rows.append(_measure(memory, base, n_layers, k, 100 if quick else 1000))
    _print(rows)
    if json_file is not None:
        machine = {"machine": platform.processor() or platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
        json_file.write_text(json.dumps({"machine": machine, "unit": "microseconds, median", "rows": rows}, indent=2) + "\n")


def _measure(memory: HybridMemory, base: Sequence, n_layers: int, k: int, n_repeats: int) -> dict[str, float]:
    made: list[Sequence] = []

    def prepare() -> Sequence:
        for sequence in made:
            memory.close(sequence)
        made[:] = [memory.fork(base)]
        with memory.step({made[0]: [1] * k}):
            pass
        return made[0]

    def forked(sequence: Sequence) -> None:
        made.append(memory.fork(sequence))

    length = base.length
    figures = {
        "rollback_us": median_us(prepare, lambda s: memory.rollback(s, to=length), n_repeats),
        "fork_us": median_us(prepare, forked, n_repeats),
        "reorder_us": median_us(prepare, lambda s: memory.reorder({s: base}), n_repeats),
    }
    for sequence in made:
        memory.close(sequence)
    return {"layers": n_layers, "context_tokens": length, "k_tokens": k, **{name: round(value, 1) for name, value in figures.items()}}


def _print(rows: list[dict[str, float]]) -> None:
    table = Table(title="Going back: bookkeeping only, medians")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:,}" for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    app()
