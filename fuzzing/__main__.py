"""Runs `python -m fuzzing [TARGET[:N] ...] [--inputs N] [--seed S]`, or reads one input again: `--number K`."""

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
_HELP = f"of {', '.join(TARGETS)}; all by default; NAME:N feeds it N inputs"


def main(
    targets: Annotated[
        list[str] | None, typer.Argument(help=f"of {', '.join(TARGETS)}; all by default; NAME:N feeds it N inputs")
    ] = None,
    inputs: Annotated[int, typer.Option(min=1, help="of each target that names no number")] = 1000,
    seed: Annotated[int, typer.Option(help="another one gives other inputs")] = 0,
    number: Annotated[int | None, typer.Option(help="read this input alone, in this process")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="write findings to tests/data/fuzzing")] = False,
) -> None:
    """Feed hostile inputs to the library's readers; exit with 1 if a reader handles one of them badly."""
    chosen = _counts(targets or list(TARGETS), inputs)
    if number is not None:
        _read_one(next(iter(chosen)), seed, number)
        return
    table = Table("target", "inputs", "seconds", "findings")
    found: list[Finding] = []
    began = time.perf_counter()
    for name, n_inputs in chosen.items():
        started = time.perf_counter()
        own = run(name, seed, n_inputs)
        table.add_row(name, f"{n_inputs:,}", f"{time.perf_counter() - started:.0f}", str(len(own)))
        found += own
        for finding in own:
            print(f"{name} --seed {seed} --number {finding.number}: {finding.place}\n{finding.text}", flush=True)
            if keep:
                _keep(finding)
    table.add_section()
    table.add_row("all", f"{sum(chosen.values()):,}", f"{time.perf_counter() - began:.0f}", str(len(found)))
    Console().print(table)
    sys.exit(bool(found))


def _counts(targets: list[str], usual: int) -> dict[str, int]:
    """Return the number of inputs for each target. "NAME:N" asks for N inputs, "NAME" for the usual number."""
    found = {}
    for target in targets:
        name, _, count = target.partition(":")
        if name not in TARGETS:
            raise typer.BadParameter(f"{name!r} is no target; there are {', '.join(TARGETS)}")
        if count and not (count.isascii() and count.isdigit() and int(count)):
            raise typer.BadParameter(f"{target!r} names {count!r} inputs; give a whole number of at least 1")
        found[name] = int(count or usual)
    return found


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
