"""Lists the commands that have the common options only. Their help is the first paragraph of what they call."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import (
    agentic,
    books,
    compiling,
    delta_rules,
    drift,
    eight_bits,
    fleet,
    folds,
    gradients,
    holes,
    indexed,
    kernels,
    large,
    locks,
    prefixes,
    reproducible,
    restarts,
    rounding,
    sampling,
    speculative,
    states,
    trees,
)
from benchmarks.commands.options import BOOK_TESTS, MODEL_TESTS, Out, Quick, Threads, app, run
from benchmarks.harness import Report

Measure = Callable[..., Report]

WITH_THREADS: dict[str, tuple[Measure, tuple[str, ...]]] = {
    "agentic": (agentic.agentic, ("tests/benchmarks/test_agentic.py",)),
    "bookkeeping": (books.bookkeeping, BOOK_TESTS),
    "delta-rules": (delta_rules.delta_rules, ("tests/memory/kernels/test_states.py",)),
    "drift": (drift.drift, ("tests/memory/state/test_eight_bits.py",)),
    "folds": (folds.folds, BOOK_TESTS),
    "gradients": (
        gradients.gradients,
        ("tests/memory/training/test_parity.py::test_a_text_that_was_rolled_back_and_forked[1-7-jamba]",),
    ),
    "gradient-rounding": (rounding.gradient_rounding, ("tests/memory/training/test_rounding.py",)),
    "holes": (holes.holes, ("tests/memory/sequences/test_compactor.py",)),
    "indexed": (indexed.indexed, ("tests/memory/kernels/test_row_choice.py",)),
    "kernels": (kernels.kernels, ("tests/memory/kernels/test_kernels.py",)),
    "large": (large.large, MODEL_TESTS),
    "memory": (books.memory_bytes, BOOK_TESTS),
    "prefixes": (prefixes.prefixes, ("tests/memory/prefix/test_cache.py", "tests/memory/storage/test_files.py")),
    "reproducible": (reproducible.reproducible, ("tests/reproducible/test_reproducible.py",)),
    "restarts": (restarts.restarts, ("tests/memory/prefix/test_saved.py", "tests/memory/prefix/test_outside.py")),
    "rollback": (books.rollback, BOOK_TESTS),
    "sampling": (sampling.sampling, ("tests/chat/sampling/test_sampling.py",)),
    "speculative": (speculative.speculative, ("tests/chat/decoding/test_speculative.py",)),
    "states": (states.states, BOOK_TESTS),
    "trees": (trees.trees, ("tests/memory/trees/test_trees.py",)),
}
"""Names of commands, with what they measure and the tests that must pass before."""
WITHOUT_THREADS: dict[str, tuple[Measure, tuple[str, ...]]] = {
    "compile": (compiling.compiling, ()),
    "eight-bits": (eight_bits.eight_bits, ("tests/memory/state/test_eight_bits.py",)),
    "fleet": (fleet.fleet, ("tests/cluster/routing/test_policy.py", "tests/cluster/simulation/test_fleet.py")),
    "locks": (locks.locks, ()),
}


def _add(name: str, measure: Measure, tests: tuple[str, ...], *, has_threads: bool) -> None:
    def with_threads(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
        run(measure, tests, quick, out, threads)

    def without_threads(quick: Quick = False, out: Out = None) -> None:
        run(measure, tests, quick, out, None)

    app.command(name=name, help=measure.__doc__)(with_threads if has_threads else without_threads)


for _name, (_measure, _tests) in WITH_THREADS.items():
    _add(_name, _measure, _tests, has_threads=True)
for _name, (_measure, _tests) in WITHOUT_THREADS.items():
    _add(_name, _measure, _tests, has_threads=False)
