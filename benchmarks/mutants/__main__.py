"""Runs `python -m benchmarks.mutants [--file PATH] [--sample N] [--seed S] [--out FOLDER]`.

It is not a command of `python -m benchmarks`, because that program imports the library, and each fork must import a
mutant of the library instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.mutants.killing import FILES, Choice, kill


def main(
    file: Annotated[list[str] | None, typer.Option(help="Of this one alone; may be repeated.")] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="So many of each file; all unless given.")] = None,
    seed: Annotated[int, typer.Option(help="Another one draws others.")] = 0,
    seconds: Annotated[float, typer.Option(help="Of the processor, for the tests of one mutant.")] = 20.0,
    jobs: Annotated[int, typer.Option(min=1, help="Tried at a time.")] = 2,
    wide: Annotated[bool, typer.Option(help="Ask tests of all kinds of memories too, which take minutes.")] = False,
    again: Annotated[bool, typer.Option(help="Try those again that survived, for new tests.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the report; a run that was ended goes on there.")] = None,
) -> None:
    """Put small faults into the core, one at a time, and count those that tests find; exit with 1 below 85 %."""
    if unknown := [path for path in file or () if path not in FILES]:
        raise typer.BadParameter(f"{unknown} are none of {', '.join(FILES)}", param_hint="--file")
    if not kill(Choice(tuple(file or FILES), sample, seed, seconds, jobs, wide, again), out):
        raise typer.Exit(1)


typer.run(main)
