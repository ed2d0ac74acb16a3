"""Lists the commands that measure models beside transformers and llama.cpp, in 32, 16, 8 and 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks import agreement, architectures, bridge, speed
from benchmarks import dtypes as dtypes_
from benchmarks import llamacpp as llamacpp_
from benchmarks import sparse as sparse_attention
from benchmarks.commands.options import MODEL_TESTS, Model, Out, Quick, Threads, app, known, run
from benchmarks.llamacpp_peer import require_llamacpp
from benchmarks.real import report as real_files
from benchmarks.without_bfloat16 import without_bfloat16


@app.command()
def parity(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="A random checkpoint of the tests, or how names of several begin: jamba, qwen4-exp; may be repeated; "
            "all unless given.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two checkpoints.")] = False,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Measure the largest difference between our logits and transformers', on random checkpoints in float32."""
    all_names = tuple(architectures.checkpoint_configs())
    names = [name for given in model or () for name in _beginning(given, all_names)]
    run(architectures.parity, (), quick, out, threads, names=list(dict.fromkeys(names or all_names)))


def _beginning(given: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that are this one, or begin with it and a hyphen."""
    if not (found := tuple(name for name in names if f"{name}-".startswith(f"{given}-"))):
        raise typer.BadParameter(f"{given}: choose one of {', '.join(names)}")
    return found


@app.command()
def decode(model: Model = None, quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure decode steps: against transformers, against a step without mixers, and with a window of 0.

    It also measures how the time of a decode step grows with the context and with the number of sequences.
    """
    plot = None if out is None else out / "decode.png"
    run(speed.decode, MODEL_TESTS, quick, out, threads, models=known(model, n_quick=2 if quick else None), plot=plot)


@app.command()
def prefill(model: Model = None, quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure the prefill of one long and of many short prompts, against transformers."""
    run(speed.prefill, MODEL_TESTS, quick, out, threads, models=known(model, n_quick=2 if quick else None))


@app.command()
def dtypes(model: Model = None, quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure decode, prefill and answers on the CPU in 32, 16, 8 and 4 bits, against transformers in bfloat16."""
    run(dtypes_.dtypes, MODEL_TESTS, quick, out, threads, models=known(model, n_quick=2 if quick else None))


@app.command(name="without-bfloat16")
def without_bfloat16_(model: Model = None, quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure models in bfloat16 and in float32, as on a CPU that has no instructions for products of bfloat16."""
    run(without_bfloat16, MODEL_TESTS, quick, out, threads, models=known(model, n_quick=2 if quick else None))


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
    tests = ("tests/benchmarks/test_llamacpp.py", *(() if quick else ("tests/models/loading/test_gguf.py",)))
    models = known(model, llamacpp_.MODELS, n_quick=1 if quick else None)
    run(llamacpp_.llamacpp, tests, quick, out, threads, models=models)


@app.command(name="bridge")
def bridge_(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help=f"One of {', '.join(bridge.MODELS)}; may be repeated; all unless given."),
    ] = None,
    by_cpu_time: Annotated[
        bool, typer.Option("--by-cpu-time", help="Count CPU seconds of one thread, for a machine that is busy.")
    ] = False,
    quick: Quick = False,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Measure transformers' `generate` with its own cache and with a memory of ours."""
    tests = () if quick else ("tests/models/test_hf_generate.py",)
    models = known(model, bridge.MODELS, n_quick=1 if quick else None)
    run(bridge.bridge, tests, quick, out, threads, models=models, by_cpu_time=by_cpu_time)


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
    families = known(family, tuple(agreement.FAMILIES), n_quick=2 if quick else None)
    report = run(agreement.agreement, (), quick, out, threads, families=families)
    if not all(row["same model"] for rows in report.tables.values() for row in rows):
        raise typer.Exit(1)


@app.command()
def sparse(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure attention that keeps, or reads, only a budget of rows: quality and time.

    Quality is the share of right answers of the embedded model; time is that of a decode step.
    """
    tests = ("tests/memory/eviction/test_policies.py", "tests/memory/attention/test_selection.py")
    run(sparse_attention.sparse, tests, quick, out, threads, plot=None if out is None else out / "sparse.png")


@app.command(name="table")
def table_() -> None:
    """Write the docs' table of architectures, from the registry and the parity that was measured last."""
    architectures.write_table()


@app.command(name="real")
def real_(
    llama: Annotated[Path, typer.Option("--llama", help="Folder of llama-server and llama-perplexity.")],
    file: Annotated[list[Path] | None, typer.Option("--file", help="GGUF file; may be repeated.")] = None,
    book: Annotated[Path, typer.Option("--book", help="Text of 20,000 tokens or more.")] = real_files.BOOK,
    part: Annotated[
        list[str] | None,
        typer.Option("--part", help=f"One of {', '.join(real_files.PARTS)}; may be repeated; all unless given."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One round, a tenth of the text.")] = False,
    out: Out = None,
    threads: Threads = 1,
) -> None:
    """Measure published models beside llama.cpp: servers, greedy texts, perplexity, policies and drafts.

    Without --file, the models that `python -m tests.real.download` fetches are measured.
    """
    parts = known(part, real_files.PARTS, n_quick=None)
    files, tests = file or list(real_files.FILES), ("tests/models/weights/test_gguf_forms.py",)
    if missing := [path for path in (*files, book) if not path.exists()]:
        raise typer.BadParameter(f"{missing[0]} does not exist; python -m tests.real.download fetches it")
    run(
        real_files.real, () if quick else tests, quick, out, threads,
        programs=llama, files=files, book=book, parts=parts, kept=out,
    )  # fmt: skip
