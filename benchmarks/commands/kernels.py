"""Lists the commands that measure and tune kernels, on the processor and on a GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks import compiling, delta_rules, gpu_tune, indexed, kernels
from benchmarks import gpu as gpu_kernels
from benchmarks.commands.options import Out, Quick, Threads, app, run


@app.command(name="kernels")
def kernels_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure how many bytes a second each decode kernel moves, beside torch's copy."""
    run(kernels.kernels, ("tests/memory/kernels/test_kernels.py",), quick, out, threads)


@app.command(name="indexed")
def indexed_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure a decode step of attention that reads the rows an index chooses, beside dense attention."""
    run(indexed.indexed, ("tests/memory/kernels/test_row_choice.py",), quick, out, threads)


@app.command(name="delta-rules")
def delta_rules_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure a decode step of delta rules: a decay for each key channel beside one for each head."""
    run(delta_rules.delta_rules, ("tests/memory/kernels/test_states.py",), quick, out, threads)


@app.command(name="compile")
def compile_(quick: Quick = False, out: Out = None) -> None:
    """Measure how long each CPU kernel takes to compile, and how long all kernels of a model take."""
    run(compiling.compiling, (), quick, out, None)


@app.command()
def gpu(quick: Quick = False, out: Out = None) -> None:
    """Measure the kernels and whole decode steps on an NVIDIA GPU, beside torch's copy and other libraries.

    Decoding with pages in host memory is compared with swapping sequences.
    """
    gpu_kernels.require_gpu()
    tests = (
        "tests/kernels_cuda/test_attention.py",
        "tests/kernels_cuda/test_states.py",
        "tests/memory/attention/test_host_pages.py",
    )
    run(gpu_kernels.gpu, tests, quick, out, None)


@app.command()
def tune(
    ship: Annotated[
        bool, typer.Option("--ship", help="Into the package, for all devices of this compute capability.")
    ] = False,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Choose tile sizes, warps and stages of the kernels for this NVIDIA GPU, by measuring them.

    The choices are written into the user's cache. Tuning takes less than eight minutes.
    """
    gpu_kernels.require_gpu()
    # each result is compared with the default's before it is timed
    run(gpu_tune.tune, (), quick, out, None, ship=ship)
