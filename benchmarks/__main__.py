"""Runs `python -m benchmarks COMMAND`, where COMMAND is one of those in `benchmarks.commands`."""

from __future__ import annotations

import subprocess
import sys

import typer

from benchmarks.commands import kernels, models, plain, proof, serving  # noqa: F401 (each adds its commands)
from benchmarks.commands.options import Out, Quick, Threads, app


@app.command(name="all")
def all_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Run the commands that need no server, device or other library, each in a process of its own.

    In one process, the heap that one command leaves behind changes a peer's time by half.
    """
    options = [
        *(["--quick"] if quick else []),
        *(["--out", str(out)] if out else []),
        *(["--threads", str(threads)] if threads else []),
    ]
    commands = (
        "parity", "bookkeeping", "rollback", "drift", "eight-bits", "folds", "holes", "memory", "prefixes", "restarts",
        "agentic", "kernels", "delta-rules", "indexed", "sampling", "schemas", "states", "sparse", "speculative",
        "drafts", "trees", "prefill", "decode", "dtypes", "without-bfloat16", "bridge", "gradients",
        "gradient-rounding", "reproducible",
    )  # fmt: skip
    failed = [
        name
        for name in commands
        if subprocess.run([sys.executable, "-m", "benchmarks", name, *options], check=False).returncode
    ]
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
