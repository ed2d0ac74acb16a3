"""Measures what states of 8 bits save, and how far outputs drift from those with float32 states."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from benchmarks.harness import Report
from benchmarks.states import DRIFTING
from hybridmem.memory import HybridMemory, MemorySpec, RecurrentSpec
from hybridmem.memory.capacity import plan_sequence
from hybridmem.memory.recurrences import DeltaRuleShape, SSDShape
from hybridmem.memory.sequences.folding import FoldMode, TailRules
from hybridmem.models import load_model

WINDOW = 32
N_BACK = 8
"""How many tokens each of the rollbacks takes back."""

CHECKPOINTS: dict[str, tuple[RecurrentSpec, int]] = {
    "Granite-4.0-H-Small": (SSDShape(128, 64, 1, 128, 4).spec(), 36),
    "Qwen3.5-9B": (DeltaRuleShape(32, 16, 128, 128, 4).spec(), 24),
    "Nemotron-3-Nano": (SSDShape(64, 64, 8, 128, 4).spec(), 23),
}
"""The recurrence of each layer, and how many layers have it, by their configs."""

MODES: dict[str, dict[str, str]] = {
    "bfloat16": {"state_dtype": "bfloat16", "fold": "keep"},
    "int8": {"state_dtype": "int8"},
    "fp8": {"state_dtype": "fp8"},
    "int8, at each token": {"state_dtype": "int8"},
}


def drift(*, quick: bool) -> Report:
    """Measure what states of 8 bits save, and how far outputs drift from those with float32 states."""
    report = Report("drift")
    report.notes.append(
        '"At each token" rounds the state with every token, which the library refuses to do. All else is float32. '
        f"The rollback window has {WINDOW} tokens."
    )
    _bytes(report)
    for name in ("mamba2",) if quick else DRIFTING:
        _drift(report, name, 256 if quick else 32_000, 10 if quick else 1000)
    return report


def _bytes(report: Report) -> None:
    """Compare the bytes of states of a session, by plan and by usage, and how many sessions fit."""
    for name, (spec, n_layers) in CHECKPOINTS.items():
        model = MemorySpec(((spec,),) * n_layers, 9, torch.bfloat16, torch.device("meta"))
        found = {dtype: _session(model, dtype) for dtype in (None, "bfloat16", "int8")}
        default = _session(model, None, fold="keep")
        report.add("bytes of a session's states, and sessions in 1 GiB", {
            "model": name, "layers": n_layers,
            **{f"{dtype or 'float32'}, MiB": x[0] / 2**20 for dtype, x in found.items()},
            "int8 / float32 by plan": found["int8"][0] / found[None][0],
            "by usage": found["int8"][1] / found[None][1],
            **{f"sessions, {dtype or 'float32'}": x[2] for dtype, x in found.items()},
            'float32, fold="keep"': default[2],
        })  # fmt: skip


def _session(model: MemorySpec, state_dtype: str | None, fold: str = "defer") -> tuple[int, int, int]:
    """Return the bytes of states by plan and by usage, and how many sessions of 64 tokens fit into 1 GiB."""
    options = {"rollback_window": WINDOW, "state_dtype": state_dtype, "fold": fold}
    plan = plan_sequence(model, 1000, **options)  # type: ignore[arg-type]
    memory = HybridMemory(model, "1GiB", device="meta", **options)  # type: ignore[arg-type]
    memory.run(None, {memory.open(): [1] * 1000})
    return plan.by_kind["states"], memory.usage().by_kind["states"], 2**30 // plan.most_bytes


def _drift(report: Report, name: str, n_tokens: int, n_rollbacks: int) -> None:
    from tests.models.checkpoints import write_checkpoint  # These weights let states affect the outputs.

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), DRIFTING[name])
        model = load_model(folder, progress=False)
    memories = {"float32": HybridMemory(model.memory_spec, "256MiB", rollback_window=WINDOW)}
    for mode, options in MODES.items():
        with _at_each_token() if "each" in mode else mock.patch.dict({}):
            memories[mode] = HybridMemory(model.memory_spec, "256MiB", rollback_window=WINDOW, **options)  # type: ignore[arg-type]
    sequences = {mode: memory.open() for mode, memory in memories.items()}
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(4, model.memory_spec.vocab_size, (n_tokens,), generator=generator).tolist()
    every, sums, agreed, n_scored, at = (
        n_tokens // n_rollbacks,
        dict.fromkeys(MODES, 0.0),
        dict.fromkeys(MODES, 0),
        0,
        0,
    )
    worst, marks = dict.fromkeys(MODES, 0.0), [m for m in (n_tokens // 8, n_tokens // 2, n_tokens) if m]
    while at < n_tokens:
        outputs = {}
        for mode, memory in memories.items():
            with memory.step({sequences[mode]: tokens[at]}) as step:
                outputs[mode] = model(step)[0]
        exact, at, n_scored = outputs["float32"], at + 1, n_scored + 1
        for mode in MODES:
            apart = (outputs[mode] - exact) / exact.std()
            sums[mode] += float(apart.square().mean())
            worst[mode] = max(worst[mode], float(apart.abs().max()))
            agreed[mode] += int(exact.argmax() == outputs[mode].argmax())
        if at in marks:
            for mode in MODES:
                report.add(f"drift with {n_rollbacks:,} rollbacks of {N_BACK} tokens in {n_tokens:,}", {
                    "model": name, "states": mode, "token": at,
                    "rms of logits / their std": (sums[mode] / n_scored) ** 0.5,
                    "worst / std": worst[mode], "same first choice, %": 100 * agreed[mode] / n_scored,
                })  # fmt: skip
        if at % every == 0 and at < n_tokens:  # Feed other tokens and take them back. They must leave no trace.
            for mode, memory in memories.items():
                if "each" not in mode:  # A memory that folds at each token has no tail, so it cannot go back.
                    with memory.step({sequences[mode]: tokens[:N_BACK]}) as step:
                        model(step)
                    memory.rollback(sequences[mode], n_tokens=N_BACK)


@contextmanager
def _at_each_token() -> Iterator[None]:
    """Let a memory fold after each token, with a tail of one."""
    rules = TailRules._with_ring(FoldMode.DEFER, 1, 1)
    with (
        mock.patch.object(TailRules, "of", return_value=rules),
        mock.patch("hybridmem.memory.build.LEAST_FOLD_TOKENS", 1),
    ):
        yield
