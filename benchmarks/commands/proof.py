"""Lists the commands that attack the library and count what survives."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks import conformance, covered, failures, operation, soak
from benchmarks.commands.options import Out, Quick, Threads, app, run
from tests.failure.survive import EVERYTHING
from tests.operation.runs import SIMULATIONS


@app.command(name="soak")
def soak_(
    minutes: Annotated[float, typer.Option(help="How long, of the processor's time.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Another one is another run.")] = 0,
    quick: Quick = False,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Keep memories of every kind busy at full budget, and count wrong results, leaks, and slowdowns over time."""
    run(soak.measure, (), quick, out, threads, minutes=minutes, seed=seed)


@app.command(name="conformance")
def conformance_(
    examples: Annotated[int, typer.Option("--examples", min=1, help="Histories of each promise.")] = 10,
) -> None:
    """Write the docs' table of the promises that the memories of the installed other libraries keep."""
    conformance.write_page(conformance.conformance(examples), conformance.PAGE)


@app.command(name="failures")
def failures_(
    every: Annotated[int, typer.Option("--every", min=1, help="Each n-th point of a call alone.")] = 1,
    set_up: Annotated[list[str] | None, typer.Option("--set-up", help="One of them; may be repeated.")] = None,
    out: Out = None,
) -> None:
    """Let each allocation, kernel, layer, file call, callback and tokenizer of every public call fail, one by one."""
    unknown = [name for name in set_up or () if name not in EVERYTHING]
    if unknown:
        raise typer.BadParameter(f"{unknown} are none of {', '.join(EVERYTHING)}", param_hint="--set-up")
    if not failures.failures(set_up or EVERYTHING, every, out):
        raise typer.Exit(1)


@app.command(name="coverage")
def coverage_(
    tests: Annotated[list[str] | None, typer.Argument(help="Paths; all of the default run unless given.")] = None,
    out: Out = None,
) -> None:
    """Measure which lines and branches of memory/ the default tests run, folder by folder, in 15 minutes or more."""
    found = covered.covered(tests or ["tests"], out)
    found.show()
    if out is not None:
        found.write(out)


@app.command(name="operation")
def operation_(
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many.")] = 1000,
    first: Annotated[int, typer.Option("--first", min=0, help="The lowest one.")] = 3,
    of: Annotated[list[str] | None, typer.Option("--of", help="engine or server; both unless given.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes.")] = 2,
    out: Out = None,
) -> None:
    """Run many seeds of the engine and the server in simulated time.

    It checks that no request waits for ever or gets a wrong answer.
    """
    if unknown := [name for name in of or () if name not in SIMULATIONS]:
        raise typer.BadParameter(f"{unknown} are none of {', '.join(SIMULATIONS)}", param_hint="--of")
    found, is_whole = operation.operation(of or SIMULATIONS, first, seeds, jobs)
    found.show()
    if out is not None:
        found.write(out)
    if not is_whole:
        raise typer.Exit(1)
