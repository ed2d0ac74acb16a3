"""Holds what the commands share: the application, their options, and how a measurement runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.harness import Report, require_green
from benchmarks.workloads import MODELS

HELP = """Measures what is promised about speed and memory: `python -m benchmarks COMMAND`.

Each command first runs the tests of what it measures; if one fails, no figure is printed. Then it measures ours and the
peer in one process, one after the other in each round, with the same weights, dtype and threads, and prints tables;
with `--out FOLDER` it writes them as JSON and Markdown, with the machine and the versions.
"""
app = typer.Typer(add_completion=False, help=HELP)
Quick = Annotated[bool, typer.Option("--quick", help="Smaller, coarser, under a minute.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for NAME.json and NAME.md.")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Of torch and of the kernels; torch's choice unless given.")
]

Model = Annotated[
    list[str] | None,
    typer.Option("--model", help=f"One of {', '.join(MODELS)}; may be repeated; all unless given, in a quick run two."),
]

MODEL_TESTS = (
    "tests/models/test_parity.py",
    "tests/memory/kernels/test_kernels.py",
    "tests/memory/kernels/test_states.py",
)
BOOK_TESTS = ("tests/memory/test_hybrid.py", "tests/memory/sequences/test_batch.py", "tests/memory/test_coordinator.py")


def run(
    measure: Callable[..., Report],
    tests: tuple[str, ...],
    quick: bool,
    out: Path | None,
    threads: int | None,
    **options: object,
) -> Report:
    """Run tests and then, if they pass, a measurement; show its report, and write it if `out` is a folder."""
    if tests:
        require_green(*tests, only="prompt_at_once or kernel" if quick and tests == MODEL_TESTS else None)
    if threads is not None:
        torch.set_num_threads(threads)
    report = measure(quick=quick, **options)
    report.show()
    if out is not None:
        report.write(out)
    return report


def known(models: list[str] | None, all_models: tuple[str, ...] = MODELS, *, n_quick: int | None) -> list[str]:
    """Return the models that were named. If none was, return all models, or the first `n_quick` in a quick run."""
    if unknown := set(models or ()) - set(all_models):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose one of {', '.join(all_models)}")
    return models or list(all_models[:n_quick])
