"""Lists the commands that measure and tune kernels on a GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks import gpu as gpu_kernels
from benchmarks import gpu_tune
from benchmarks.commands.options import Out, Quick, app, run


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
    # No tests run first, because each result is compared with the default's before it is timed.
    run(gpu_tune.tune, (), quick, out, None, ship=ship)
