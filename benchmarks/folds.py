"""Measures what the fold modes of recurrent layers cost on a CPU: the time of decode steps, and the bytes of a session.

The steps of all modes are interleaved, so that other work of the machine slows all modes equally. Steps in which the
body moves take longer, and modes differ in how many such steps they have. So the time of a mode is the mean over all
steps of two windows, where each step counts with its median over the rounds.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from benchmarks.harness import Report, interleave
from benchmarks.ours import N_UNTIMED, Ours
from benchmarks.workloads import both_models
from hybridmem.memory import HybridMemory
from hybridmem.memory.sequences.folding import Fold
from hybridmem.models import LanguageModel

WINDOW = 64
"""More than the default window, so that the modes differ more."""
N_PROMPT = 64
SUBJECTS = {"jamba": "Mamba-1", "bamba": "Mamba-2", "qwen3_5": "gated delta rule"}


def folds(*, quick: bool) -> Report:
    """Measure decode steps in each fold mode, for 1, 8 and 32 sequences, and the most bytes that a session takes."""
    report = Report("folds")
    for name, recurrence in SUBJECTS.items():
        with both_models(name) as (model, _):
            states = _session_states(model)
            for n in (1, 8) if quick else (1, 8, 32):
                subjects: dict[str, Ours] = {}
                for fold in get_args(Fold):
                    subjects[fold] = Ours(model, n, rollback_window=WINDOW, fold=fold)
                step_ms = _mean_step_ms(subjects, 2 if quick else 3)
                report.add(f"a decode step on a CPU with a window of {WINDOW}, ms, and a session's states", {
                    "model": name, "recurrence": recurrence, "sequences": n,
                    **step_ms, **{f"{fold} / keep": step_ms[fold] / step_ms["keep"] for fold in ("replay", "defer")},
                    **{f"{fold}, states": states[fold] for fold in get_args(Fold)},
                })  # fmt: skip
    return report


def _mean_step_ms(subjects: dict[str, Ours], n_rounds: int) -> dict[str, float]:
    """Return for each mode the mean time of a decode step over two windows, in milliseconds."""
    rounds: dict[str, list[Tensor]] = {fold: [] for fold in subjects}
    for _ in range(n_rounds):
        for subject in subjects.values():
            subject.rewind(N_PROMPT)
        times = interleave(
            {fold: subject.decode for fold, subject in subjects.items()}, 2 * WINDOW, n_warm_up=N_UNTIMED
        )
        for fold, samples in times.items():
            rounds[fold].append(torch.tensor(samples.seconds))
    return {fold: 1000 * float(torch.stack(found).median(0).values.mean()) for fold, found in rounds.items()}


def _session_states(model: LanguageModel) -> dict[str, float]:
    """Return the most bytes that states and tails of a session take, as multiples of the bytes of one state."""
    found = {}
    for fold in get_args(Fold):
        memory = HybridMemory(model.memory_spec, "1GiB", rollback_window=WINDOW, fold=fold, device="meta")
        sequence, most_bytes = memory.open(), 0
        for _ in range(4 * WINDOW):
            memory.run(None, {sequence: 1})
            by_pool = memory.counters.bytes_by_pool()
            most_bytes = max(most_bytes, by_pool["states"] + by_pool["tails"])
        found[fold] = most_bytes / memory.usage().block_bytes["states"]
    return found
