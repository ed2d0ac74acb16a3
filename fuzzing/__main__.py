"""Runs `python -m fuzzing [TARGET ...] [--inputs N] [--seed S]`, or reads one input again: `--number K`."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fuzzing.running import Finding, draw, judge, run
from fuzzing.targets import TARGETS, make_target

FINDINGS = Path(__file__).parent.parent / "tests" / "data" / "fuzzing"
"""Inputs that were not read well once: a folder for each target, read again by the tests."""


def main(
    targets: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(TARGETS)}; all by default")] = None,
    inputs: Annotated[int, typer.Option(min=1, help="of each target")] = 1000,
    seed: Annotated[int, typer.Option(help="another one gives other inputs")] = 0,
    number: Annotated[int | None, typer.Option(help="read this input alone, in this process")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="write findings to tests/data/fuzzing")] = False,
) -> None:
    """Feed hostile inputs to everything that reads them; ends with 1 if one of them is not read well."""
    chosen = targets or list(TARGETS)
    if unknown := [name for name in chosen if name not in TARGETS]:
        raise typer.BadParameter(f"{unknown[0]!r} is no target; there are {', '.join(TARGETS)}")
    if number is not None:
        _read_one(chosen[0], seed, number)
        return
    table = Table("target", "inputs", "seconds", "findings")
    found: list[Finding] = []
    for name in chosen:
        started = time.perf_counter()
        own = run(name, seed, inputs)
        table.add_row(name, f"{inputs:,}", f"{time.perf_counter() - started:.0f}", str(len(own)))
        found += own
        for finding in own:
            print(f"{name} --seed {seed} --number {finding.number}: {finding.place}\n{finding.text}", flush=True)
            if keep:
                _keep(finding)
    Console().print(table)
    sys.exit(bool(found))


def _read_one(name: str, seed: int, number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = make_target(name, Path(folder))
        data = draw(target, name, seed, number)
        print(repr(data[:2000]), flush=True)
        problem = judge(target, data)
        print("read or refused well" if problem is None else problem[1])


def _keep(finding: Finding) -> None:
    data = finding.data
    place = FINDINGS / finding.target / hashlib.sha256(data).hexdigest()[:16]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)


typer.run(main)
