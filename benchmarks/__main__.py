"""`python -m benchmarks COMMAND`: what is promised about speed and memory, measured, never asserted.

Each command first runs the tests of what it measures; if one fails, no figure is printed. Then it measures ours and the peer in
one process, one after the other in each round, with the same weights, dtype and threads, and prints tables; with `--out FOLDER`
it writes them as JSON and Markdown, with the machine and the versions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import books, kernels, speed
from benchmarks.harness import Report, require_green

app = typer.Typer(add_completion=False, help=__doc__)
Quick = Annotated[bool, typer.Option("--quick", help="Smaller, coarser, under a minute.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for NAME.json and NAME.md.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Of torch and of the kernels; torch's choice unless given.")]

MODEL_TESTS = ("tests/models/test_parity.py", "tests/unit/test_kernels.py")
BOOK_TESTS = ("tests/unit/test_memory.py", "tests/unit/test_batch.py", "tests/unit/test_transactions.py")


def _run(
    measure: Callable[..., Report], tests: tuple[str, ...], quick: bool, out: Path | None, threads: int | None, **options: object
) -> None:
    require_green(*tests)
    if threads is not None:
        torch.set_num_threads(threads)
    report = measure(quick=quick, **options)
    report.show()
    if out is not None:
        report.write(out)


@app.command()
def decode(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """A step of one token a sequence: against transformers, the step without mixers, a window of 0; and how it grows."""
    _run(speed.decode, MODEL_TESTS, quick, out, threads, plot=None if out is None else out / "decode.png")


@app.command()
def prefill(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Prompts, one long and many short, against transformers."""
    _run(speed.prefill, MODEL_TESTS, quick, out, threads)


@app.command(name="kernels")
def kernels_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Bytes a second of each decode kernel, beside torch's copy."""
    _run(kernels.kernels, ("tests/unit/test_kernels.py",), quick, out, threads)


@app.command()
def bookkeeping(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Steps, open and close without a model."""
    _run(books.bookkeeping, BOOK_TESTS, quick, out, threads)


@app.command()
def memory(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Bytes of sequences by kind, and of the weights."""
    _run(books.memory_bytes, BOOK_TESTS, quick, out, threads)


@app.command()
def rollback(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Rollback, fork, checkpoint, reorder and abort, against k, layers and context."""
    _run(books.rollback, BOOK_TESTS, quick, out, threads)


@app.command(name="all")
def all_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Everything."""
    for command in (bookkeeping, rollback, memory, kernels_, prefill, decode):
        command(quick, out, threads)


if __name__ == "__main__":
    app()
