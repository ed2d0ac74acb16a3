"""Runs `python -m benchmarks.mutants [--sample N] [--seed S] [--file PATH]`.

It is no command of `python -m benchmarks`, since that imports the library, and the forks must import each mutant of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.mutants.killing import FILES, kill


def main(
    sample: Annotated[int, typer.Option(min=1, help="Mutants, drawn by the seed.")] = 200,
    seed: Annotated[int, typer.Option(help="Another one draws others.")] = 0,
    file: Annotated[list[str] | None, typer.Option(help="Of this one alone; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for mutants.json, from which a run goes on.")] = None,
) -> None:
    """Put small faults into the core, one at a time, and count those that its tests find; below 85 % ends with 1."""
    if unknown := [path for path in file or () if path not in FILES]:
        raise typer.BadParameter(f"{unknown} are none of {', '.join(FILES)}", param_hint="--file")
    if not kill(sample, seed, file, out):
        raise typer.Exit(1)


typer.run(main)
