"""Measures the bytes and the time that a step takes for a tree of draft tokens.

It compares the bytes with what other engines set aside, and the time with that of plain steps and of chains.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from benchmarks.harness import Report
from benchmarks.workloads import CONFIGS, save_random
from hybridmem import HybridMemory
from hybridmem.memory import RecurrentSpec, Sequence
from hybridmem.memory.recorded import run_recorded
from hybridmem.memory.trees.step import TreeStep
from hybridmem.models import LanguageModel, load_model

SIZES = (16, 64)
N_PROMPT, WINDOW, WIDTH = 512, 64, 8
NOTE = (
    "One sequence of 512 tokens is fed a tree in one step: each level has at most 8 tokens, whose parents are "
    "drawn from the level before. A state is what all recurrent layers of the model carry from token to token. A "
    "row of a token is what its layers were given; a chain of drafts needs as many rows. Scratch is what the step "
    "holds beyond rows: states of one layer at a time, for at most 8 paths. The others' figures are their "
    "formulas, computed and not measured: vLLM sets aside a block with a state for each drafted token, and takes "
    "chains only; SGLang's intermediate_ssm has a state for each drafted token of each request; llama.cpp has a "
    "plane with a state for each drafted token where it rolls states back, and elsewhere copies the whole "
    "sequence to host memory and takes one path at a time."
)

CHAINS, BEST_CHAIN = (4, 8, 15), 8
TIMES_NOTE = (
    "Times are processor time of one thread, medians of steps that take turns, after prompts of 128 tokens. Of each "
    "step, only the first token is kept. Plain steps and chains of up to 64 tokens are replayed, as in the engine. "
    "Trees are not, because each has other paths. A step that takes as long as so many plain steps must give as many "
    f"tokens to be worth it. A tree is faster than a chain of {BEST_CHAIN} only if it gives more times as many tokens "
    "than the last column says."
)


def draft_tree(n_tokens: int, width: int, seed: int = 0) -> list[int]:
    """Return the parents of a tree that has a root, and at most `width` tokens a level."""
    random_ = random.Random(seed)
    parents, level = [-1], [0]
    while len(parents) < n_tokens:
        first = len(parents)
        parents += [random_.choice(level) for _ in range(min(width, n_tokens - first))]
        level = [*range(first, len(parents))]
    return parents


def trees(*, quick: bool) -> Report:
    """Measure bytes of trees of 16 and 64 tokens, of models in float32 and bfloat16."""
    report = Report("trees")
    report.notes += [NOTE, TIMES_NOTE]
    for name in ("jamba", "mamba2") if quick else ("jamba", "mamba", "mamba2", "bamba", "qwen3_5"):
        with tempfile.TemporaryDirectory() as folder:
            save_random(CONFIGS[name](), folder)
            for dtype in _DTYPES:
                model = load_model(folder, dtype=dtype, progress=False)
                for n_tokens in SIZES:
                    _measure(report, f"{name}, {dtype}", model, n_tokens)
                if name == "jamba" and dtype == "float32":
                    for n_sequences in (1, 8):
                        _measure_times(report, name, model, n_sequences, n_rounds=12 if quick else 40)
    return report


_DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")


def _measure(report: Report, name: str, model: LanguageModel, n_tokens: int) -> None:
    parents = draft_tree(n_tokens, WIDTH)
    memory = HybridMemory(model.memory_spec, "512MiB", rollback_window=WINDOW)
    sequence = memory.open()
    memory.run(model, {sequence: [i % 1000 for i in range(N_PROMPT)]})
    held = _bytes_inside(model, memory, sequence, [*range(n_tokens)], parents)
    longest = max(_depth(node, parents) for node in range(n_tokens))
    chain = _bytes_inside(model, memory, sequence, [*range(longest)], None)
    state, rows = memory.usage().block_bytes["states"], n_tokens * _row_bytes(model)
    # Attention's rows are not counted, because a chain of as many drafts has as many.
    more = held["states"] + held["tails"] - chain["states"] - chain["tails"]
    scratch = held["scratch"] - rows
    report.add("bytes of one step with a tree, of recurrent layers, KiB", {
        "model": name, "drafted tokens": n_tokens, "longest path": longest, "a state": state / 1024,
        "rows": rows / 1024, "scratch": scratch / 1024, "more of the budget": more / 1024,
        "states a token beyond its row": (scratch + more) / n_tokens / state, "asked": 0.05,
        "states a token with its row": (rows + scratch + more) / n_tokens / state,
        "vLLM (a chain)": (1 + n_tokens) * state / 1024, "SGLang": n_tokens * state / 1024,
        "llama.cpp, planes (a chain)": n_tokens * state / 1024,
    })  # fmt: skip


def _bytes_inside(
    model: LanguageModel, memory: HybridMemory, sequence: Sequence, tokens: list[int], parents: list[int] | None
) -> dict[str, int]:  # fmt: skip
    """Return the bytes by kind in a step of these tokens, when the model has run, and those outside of the budget."""
    given = None if parents is None else {sequence: parents}
    with memory.step({sequence: tokens}, outputs="all", parents=given) as step:
        model(step)
        found = dict(memory.usage().by_kind)
        found["scratch"] = step.scratch_bytes if isinstance(step, TreeStep) else 0
        step.accept({sequence: 0 if parents is None else []})
    return found


def _depth(node: int, parents: list[int]) -> int:
    return 1 if parents[node] < 0 else 1 + _depth(parents[node], parents)


def _row_bytes(model: LanguageModel) -> int:
    """Return the bytes of the rows of one token in all recurrent layers."""
    spec = model.memory_spec
    recurrent = [memory for layer in spec.layers for memory in layer if isinstance(memory, RecurrentSpec)]
    return sum(math.prod(memory.row_shape) for memory in recurrent) * spec.dtype.itemsize


def _measure_times(report: Report, name: str, model: LanguageModel, n_sequences: int, n_rounds: int) -> None:
    """Measure plain steps, and steps with a chain or a tree of drafts for each sequence, in one thread."""
    torch.set_num_threads(1)
    memory = HybridMemory(model.memory_spec, "2GiB", rollback_window=WINDOW)
    sequences = [memory.open() for _ in range(n_sequences)]
    memory.run(model, {own: [(i + at) % 1000 for at in range(128)] for i, own in enumerate(sequences)})

    def feed(parents: list[int], *, is_tree: bool) -> None:
        tokens = [*range(len(parents))]
        given = dict.fromkeys(sequences, parents) if is_tree else None
        outputs: Literal["last", "all"] = "all" if len(parents) > 1 else "last"
        with memory.step(dict.fromkeys(sequences, tokens), outputs=outputs, parents=given) as step:
            run_recorded(model, step)
            if len(parents) > 1:
                step.accept(dict.fromkeys(sequences, [0] if is_tree else 1))

    runs: dict[str, Callable[[], None]] = {"plain": partial(feed, [-1], is_tree=False)}
    runs |= {f"chain of {n}": partial(feed, [*range(-1, n)], is_tree=False) for n in CHAINS}
    runs |= {f"tree of {n}": partial(feed, draft_tree(1 + n, WIDTH), is_tree=True) for n in SIZES}
    seconds: dict[str, list[float]] = {run: [] for run in runs}
    for i in range(8 + n_rounds):
        for run, call in runs.items():
            started = time.thread_time()
            call()
            if i >= 8:  # The first steps are recorded.
                seconds[run].append(time.thread_time() - started)
    medians = {run: statistics.median(own) for run, own in seconds.items()}
    for run, median in medians.items():
        of_plain, of_chain = median / medians["plain"], median / medians[f"chain of {BEST_CHAIN}"]
        report.add("processor time of one step", {
            "model": name, "sequences": n_sequences, "drafts of each": run, "ms": 1e3 * median,
            "plain steps": of_plain, f"chains of {BEST_CHAIN}": of_chain,
        })  # fmt: skip
