"""Measures what is promised about speed and memory: `python -m benchmarks COMMAND`.

Each command first runs the tests of what it measures; if one fails, no figure is printed. Then it measures ours and the
peer in one process, one after the other in each round, with the same weights, dtype and threads, and prints tables;
with `--out FOLDER` it writes them as JSON and Markdown, with the machine and the versions.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import (
    agent_trace,
    agentic,
    agreement,
    architectures,
    books,
    bridge,
    compiling,
    conformance,
    covered,
    failures,
    gpu_tune,
    kernels,
    large,
    locks,
    prefixes,
    restarts,
    sampling,
    schemas,
    serving,
    soak,
    speed,
    states,
)
from benchmarks import drafts as engine_drafts
from benchmarks import dtypes as dtypes_
from benchmarks import fleet as fleets
from benchmarks import gpu as gpu_kernels
from benchmarks import llamacpp as llamacpp_
from benchmarks import page as page_
from benchmarks import sparse as sparse_attention
from benchmarks import speculative as speculative_decoding
from benchmarks.harness import Report, require_green
from benchmarks.llamacpp_peer import require_llamacpp
from benchmarks.workloads import MODELS
from tests.failure.survive import EVERYTHING

app = typer.Typer(add_completion=False, help=__doc__)
Quick = Annotated[bool, typer.Option("--quick", help="Smaller, coarser, under a minute.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for NAME.json and NAME.md.")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Of torch and of the kernels; torch's choice unless given.")
]

Model = Annotated[
    list[str] | None,
    typer.Option("--model", help=f"One of {', '.join(MODELS)}; may be repeated; all unless given, in a quick run two."),
]

MODEL_TESTS = ("tests/models/test_parity.py", "tests/unit/kernels/test_kernels.py", "tests/unit/kernels/test_states.py")
BOOK_TESTS = ("tests/unit/test_hybrid.py", "tests/unit/sequences/test_batch.py", "tests/unit/test_coordinator.py")


def _run(
    measure: Callable[..., Report],
    tests: tuple[str, ...],
    quick: bool,
    out: Path | None,
    threads: int | None,
    **options: object,
) -> Report:
    if tests:
        require_green(*tests, only="prompt_at_once or kernel" if quick and tests == MODEL_TESTS else None)
    if threads is not None:
        torch.set_num_threads(threads)
    report = measure(quick=quick, **options)
    report.show()
    if out is not None:
        report.write(out)
    return report


@app.command()
def decode(model: Model = None, quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure decode steps: against transformers, against a step without mixers, and with a window of 0.

    Also measures how their time grows with the context and with the number of sequences.
    """
    plot = None if out is None else out / "decode.png"
    _run(speed.decode, MODEL_TESTS, quick, out, threads, models=_known(model, n_quick=2 if quick else None), plot=plot)


@app.command()
def prefill(model: Model = None, quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure the prefill of one long and of many short prompts, against transformers."""
    _run(speed.prefill, MODEL_TESTS, quick, out, threads, models=_known(model, n_quick=2 if quick else None))


@app.command()
def dtypes(model: Model = None, quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure decode, prefill and answers on the CPU in 32, 16, 8 and 4 bits, against transformers in bfloat16."""
    _run(dtypes_.dtypes, MODEL_TESTS, quick, out, threads, models=_known(model, n_quick=2 if quick else None))


@app.command()
def llamacpp(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help=f"One of {', '.join(llamacpp_.MODELS)}; may be repeated; all unless given, in a quick run one.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller, coarser, under two minutes.")] = False,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Measure decode and prefill beside llama.cpp, on GGUF files of the same weights in 32, 16, 8 and 4 bits."""
    require_llamacpp()
    tests = ("tests/benchmarks/test_llamacpp.py", *(() if quick else ("tests/models/test_gguf.py",)))
    models = _known(model, llamacpp_.MODELS, n_quick=1 if quick else None)
    _run(llamacpp_.llamacpp, tests, quick, out, threads, models=models)


@app.command(name="large")
def large_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure a model of 3B parameters: loading, most resident memory, decode; needs 24 GB of memory and disk."""
    _run(large.large, MODEL_TESTS, quick, out, threads)


@app.command(name="bridge")
def bridge_(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help=f"One of {', '.join(bridge.MODELS)}; may be repeated; both unless given."),
    ] = None,
    by_cpu_time: Annotated[
        bool, typer.Option("--by-cpu-time", help="Count CPU seconds of one thread, for a machine that is busy.")
    ] = False,
    quick: Quick = False,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Measure `generate` of transformers' models on their own cache and attached to a memory."""
    tests = () if quick else ("tests/models/test_hf_generate.py",)
    models = _known(model, bridge.MODELS, n_quick=1 if quick else None)
    _run(bridge.bridge, tests, quick, out, threads, models=models, by_cpu_time=by_cpu_time)


@app.command()
def gguf(
    family: Annotated[
        list[str] | None,
        typer.Option("--family", help="llama.cpp's name of an architecture; may be repeated; all unless given."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two families.")] = False,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Compare logits with llama.cpp's own for each family whose GGUF files are read; exit with 1 if any differ."""
    require_llamacpp()
    families = _known(family, tuple(agreement.FAMILIES), n_quick=2 if quick else None)
    report = _run(agreement.agreement, (), quick, out, threads, families=families)
    if not all(row["same model"] for rows in report.tables.values() for row in rows):
        raise typer.Exit(1)


def _known(models: list[str] | None, all_models: tuple[str, ...] = MODELS, *, n_quick: int | None) -> list[str]:
    """Return the models that were named, or all; of those a quick run takes the first few."""
    if unknown := set(models or ()) - set(all_models):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose one of {', '.join(all_models)}")
    return models or list(all_models[:n_quick])


@app.command(name="kernels")
def kernels_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure how many bytes a second each decode kernel moves, beside torch's copy."""
    _run(kernels.kernels, ("tests/unit/kernels/test_kernels.py",), quick, out, threads)


@app.command(name="compile")
def compile_(quick: Quick = False, out: Out = None) -> None:
    """Measure how long each kernel of the CPU takes to compile, and all that a model needs."""
    _run(compiling.compiling, (), quick, out, None)


@app.command()
def gpu(quick: Quick = False, out: Out = None) -> None:
    """Measure the kernels and whole decode steps on an NVIDIA GPU, beside torch's copy and other libraries.

    Pages in host memory are compared with swapping.
    """
    gpu_kernels.require_gpu()
    tests = (
        "tests/kernels_cuda/test_attention.py",
        "tests/kernels_cuda/test_states.py",
        "tests/unit/attention/test_host_pages.py",
    )
    _run(gpu_kernels.gpu, tests, quick, out, None)


@app.command()
def tune(
    ship: Annotated[
        bool, typer.Option("--ship", help="Into the package, for all devices of this compute capability.")
    ] = False,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Choose tile sizes, warps and stages of the kernels for this NVIDIA GPU, by measuring them.

    Writes them into the user's cache. Takes less than eight minutes.
    """
    gpu_kernels.require_gpu()
    # each result is compared with the default's before it is timed
    _run(gpu_tune.tune, (), quick, out, None, ship=ship)


@app.command()
def bookkeeping(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure steps, open and close without a model."""
    _run(books.bookkeeping, BOOK_TESTS, quick, out, threads)


@app.command(name="locks")
def locks_(quick: Quick = False, out: Out = None) -> None:
    """Measure what it costs that calls of several threads wait for each other, beside a step without a model."""
    _run(locks.locks, (), quick, out, None)


@app.command()
def memory(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure the bytes of sequences by kind, and those of the weights."""
    _run(books.memory_bytes, BOOK_TESTS, quick, out, threads)


@app.command()
def rollback(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure rollback, fork, checkpoint, reorder and abort, against k, layers and context."""
    _run(books.rollback, BOOK_TESTS, quick, out, threads)


@app.command(name="agentic")
def agentic_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Share of agents' prompts that is reused with small budgets, beside LRU by blocks; in dry runs."""
    _run(agentic.agentic, ("tests/benchmarks/test_agentic.py",), quick, out, threads)


@app.command(name="agent-trace")
def agent_trace_(
    scale: Annotated[
        float | None,
        typer.Option("--scale", min=0.001, help="Of all lengths; 1 is 142 thousand tokens, 0.25 unless given."),
    ] = None,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Share of an agent's prompts that a server computes again, by stored responses and by chats, with a restart."""
    tests = ("tests/chat/test_session_restarts.py", "tests/chat/test_responses.py")
    _run(agent_trace.agent_trace, tests, quick, out, None, scale=scale)


@app.command(name="serving")
def serving_(
    before: Annotated[str, typer.Option("--before", help="The commit to compare with.")] = serving.BEFORE,
    at_once: Annotated[
        list[int] | None, typer.Option("--at-once", min=1, help="Requests; may be repeated; 1 to 128 unless given.")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Of some seconds for each server.")] = None,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Server under load, beside an earlier commit of this repository: throughput, and time to the first token.

    With --at-once, rows that the folder's file has of other loads are kept, if the machine is the same.
    """
    measure = partial(serving.serving, before=before, loads=at_once or serving.LOADS, rounds=rounds, out=out)
    _run(measure, ("tests/chat/test_generations.py",), quick, out, None)


@app.command(name="restarts")
def restarts_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure a chat's next turn after a restart, and prompts whose checkpoint is outside of the budget."""
    tests = ("tests/unit/prefix/test_saved.py", "tests/unit/prefix/test_outside.py")
    _run(restarts.restarts, tests, quick, out, threads)


@app.command(name="page")
def page_view(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure the server's page: weight, first paint, what watching the memory costs, and 10,000 sequences."""
    page_.require_browser()
    _run(page_.page, ("tests/chat/test_memory_view.py",), quick, out, threads)


@app.command(name="prefixes")
def prefixes_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure lookups in a radix tree, the share of tokens reused on a known workload, and swapping."""
    _run(
        prefixes.prefixes, ("tests/unit/prefix/test_cache.py", "tests/unit/storage/test_files.py"), quick, out, threads
    )


@app.command(name="states")
def states_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure recurrent states: bytes of a rollback window, drift of 16-bit states, and deferred writes."""
    _run(states.states, ("tests/benchmarks/test_deferred.py", *BOOK_TESTS), quick, out, threads)


@app.command(name="soak")
def soak_(
    minutes: Annotated[float, typer.Option(help="How long, of the processor's time.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Another one is another run.")] = 0,
    quick: Quick = False,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Keep memories of every kind busy at full budget: mismatches, leaks, latency from first to last."""
    _run(soak.measure, (), quick, out, threads, minutes=minutes, seed=seed)


@app.command()
def sparse(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure attention that keeps, or reads, only a budget of rows: quality and time.

    Quality is the share of right answers of the embedded model; time is that of a decode step.
    """
    tests = ("tests/unit/eviction/test_policies.py", "tests/unit/attention/test_page_selection.py")
    _run(sparse_attention.sparse, tests, quick, out, threads, plot=None if out is None else out / "sparse.png")


@app.command()
def drafts(
    text: Annotated[
        list[int] | None, typer.Option("--text", min=0, max=len(engine_drafts.TEXTS) - 1, help="Its number; repeated.")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1)] = None,
    quick: Quick = False,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Measure drafts in the engine: where they pay, and that they cost nothing where they do not.

    With --text, rows that the folder's file has of other texts are kept, if the machine is the same.
    """
    texts = [engine_drafts.TEXTS[number] for number in text or ()]
    tests = ("tests/chat/test_drafting.py",)
    measure = partial(engine_drafts.measure, texts=texts, rounds=rounds, out=out)
    _run(measure, tests, quick, out, threads)


@app.command()
def speculative(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure speculative decoding: prompt lookup on repetitive text, against plain decoding.

    Also measures steps by length and quality of the drafts, and bytes.
    """
    _run(speculative_decoding.speculative, ("tests/chat/test_speculative.py",), quick, out, threads)


@app.command()
def cluster(quick: Quick = False, out: Out = None) -> None:
    """Measure two replicas on a local Ray: reuse by router, what failures cost, and what moving a session takes."""
    from benchmarks import cluster as clusters  # needs Ray

    _run(clusters.cluster, ("tests/cluster/test_routing.py", "tests/cluster/test_leases.py"), quick, out, None)


@app.command()
def fleet(quick: Quick = False, out: Out = None) -> None:
    """Simulate 200 replicas under a million sessions, by each router: what is reused, moved, and how even load is."""
    _run(fleets.fleet, ("tests/cluster/test_routing.py", "tests/cluster/test_fleet.py"), quick, out, None)


@app.command()
def parity(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Compare the logits of every architecture with those of transformers."""
    _run(architectures.parity, (), quick, out, threads)


@app.command(name="conformance")
def conformance_(
    examples: Annotated[int, typer.Option("--examples", min=1, help="Histories of each promise.")] = 10,
) -> None:
    """Write the docs' table of the promises that other libraries' memories keep; those that are installed."""
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
    """Measure which lines and branches of memory/ the default tests run, room by room, in 15 minutes or more."""
    found = covered.covered(tests or ["tests"], out)
    found.show()
    if out is not None:
        found.write(out)


@app.command(name="table")
def table_() -> None:
    """Write the docs' table of architectures, from the registry and the parity that was measured last."""
    architectures.write_table()


@app.command(name="schemas")
def schemas_(
    table: Annotated[
        list[str] | None, typer.Option("--table", help=f"One of {', '.join(schemas.TABLES)}; may be repeated.")
    ] = None,
    quick: Quick = False,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Structured output: 1,000 JSON schemas, how many replies are valid, and what masks cost beside a step.

    With --table, those that the folder's file has of others are kept, if the machine is the same.
    """
    tables = _known(table, schemas.TABLES, n_quick=None)
    measure = partial(schemas.schemas_, tables=tables, out=out)
    _run(measure, ("tests/benchmarks/test_schemas.py",), quick, out, threads)


@app.command(name="sampling")
def sampling_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Decode steps of 1, 8 and 32 requests by how tokens are chosen."""
    _run(sampling.sampling, ("tests/chat/test_sampling.py",), quick, out, threads)


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
        "parity", "bookkeeping", "rollback", "memory", "prefixes", "restarts", "agentic", "kernels", "sampling",
        "schemas", "states", "sparse", "speculative", "drafts", "prefill", "decode", "dtypes", "bridge",
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
