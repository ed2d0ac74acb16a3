"""Measures the bytes that a step takes for a tree of draft tokens, beside what other engines set aside for it."""

from __future__ import annotations

import math
import random
import tempfile
from typing import Literal

from benchmarks.harness import Report
from benchmarks.workloads import CONFIGS, save_random
from hybridmem import HybridMemory
from hybridmem.memory import RecurrentSpec, Sequence
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
    report.notes.append(NOTE)
    for name in ("jamba", "mamba2") if quick else ("jamba", "mamba", "mamba2", "bamba", "qwen3_5"):
        with tempfile.TemporaryDirectory() as folder:
            save_random(CONFIGS[name](), folder)
            for dtype in _DTYPES:
                model = load_model(folder, dtype=dtype, progress=False)
                for n_tokens in SIZES:
                    _measure(report, f"{name}, {dtype}", model, n_tokens)
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
