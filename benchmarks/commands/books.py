"""Lists the commands that measure the memory itself: bookkeeping, bytes, prefixes and states."""

from __future__ import annotations

from benchmarks import agentic, books, folds, holes, locks, prefixes, restarts, states
from benchmarks.commands.options import BOOK_TESTS, Out, Quick, Threads, app, run


@app.command()
def bookkeeping(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure steps, open and close without a model."""
    run(books.bookkeeping, BOOK_TESTS, quick, out, threads)


@app.command(name="locks")
def locks_(quick: Quick = False, out: Out = None) -> None:
    """Measure what the lock around each call on a memory costs, in comparison with a step without a model."""
    run(locks.locks, (), quick, out, None)


@app.command(name="folds")
def folds_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure the fold modes of recurrent layers on a CPU: times of decode steps, and bytes of sessions."""
    run(folds.folds, BOOK_TESTS, quick, out, threads)


@app.command(name="holes")
def holes_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure how many new sequences fit into the space of closed sequences that had decoded together."""
    run(holes.holes, ("tests/memory/sequences/test_compactor.py",), quick, out, threads)


@app.command()
def memory(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure the bytes that sequences hold of each kind, and the bytes of the weights."""
    run(books.memory_bytes, BOOK_TESTS, quick, out, threads)


@app.command()
def rollback(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure rollback by k tokens, fork, checkpoint, reorder and abort, for several k, layers and contexts."""
    run(books.rollback, BOOK_TESTS, quick, out, threads)


@app.command(name="agentic")
def agentic_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure, in dry runs, how much of agents' prompts is reused with small budgets, here and by LRU of blocks."""
    run(agentic.agentic, ("tests/benchmarks/test_agentic.py",), quick, out, threads)


@app.command(name="restarts")
def restarts_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure first-token times after a restart, and for prompts whose checkpoint is outside of the budget."""
    tests = ("tests/memory/prefix/test_saved.py", "tests/memory/prefix/test_outside.py")
    run(restarts.restarts, tests, quick, out, threads)


@app.command(name="prefixes")
def prefixes_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure lookups in a radix tree, the share of tokens reused on a known workload, and swapping."""
    run(
        prefixes.prefixes,
        ("tests/memory/prefix/test_cache.py", "tests/memory/storage/test_files.py"),
        quick,
        out,
        threads,
    )


@app.command(name="states")
def states_(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure recurrent states: bytes of a rollback window, drift of 16-bit states, and deferred writes."""
    run(states.states, ("tests/benchmarks/test_deferred.py", *BOOK_TESTS), quick, out, threads)
