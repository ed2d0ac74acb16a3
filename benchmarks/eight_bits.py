"""Measures decode steps with states of 8 bits against float32 states, on one thread of a CPU.

The steps of all memories are interleaved, and only the processor time of the thread counts, so that other work of the
machine slows all of them equally. Rows fold every half window. So the time of a step is the mean over half a window.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import cast

import torch

from benchmarks.harness import Cell, Report
from benchmarks.ours import N_UNTIMED, Ours
from benchmarks.workloads import CONFIGS, Mixerless, save_random
from hybridmem.memory import Step
from hybridmem.models import LanguageModel, load_model

WINDOW = 32
N_PROMPT = 64
SUBJECTS = {"mamba2": "Mamba-2", "qwen3_5": "gated delta rule"}
STATES = {"float32": None, "int8": "int8", "fp8": "fp8"}


def eight_bits(*, quick: bool) -> Report:
    """Measure decode steps with states of 8 bits, for 1, 8 and 32 sequences, and what share of a step mixers are."""
    report = Report("eight_bits")
    torch.set_num_threads(1)
    for name in SUBJECTS:
        with tempfile.TemporaryDirectory() as folder:
            save_random(CONFIGS[name](), folder)
            for weights in ("auto", "int4"):
                model = load_model(folder, dtype="bfloat16", weights=weights, progress=False)  # type: ignore[arg-type]
                for n in (8,) if quick else (1, 8, 32):
                    report.add("a decode step on one thread, ms of processor time", {
                        "model": name, "recurrence": SUBJECTS[name],
                        "weights": "bfloat16" if weights == "auto" else weights, "sequences": n,
                        **_times(model, n, 2 if quick else 4),
                    })  # fmt: skip
    report.notes.append(
        'Rows are bfloat16, with a rollback window of 32 tokens. float32 states fold by "keep". A time is the median '
        'over rounds of 16 steps, of which one folds the rows of all sequences. "Without mixers" is a step without '
        "convolutions and states: no states make a step faster."
    )
    return report


def _times(model: LanguageModel, n_sequences: int, n_rounds: int) -> dict[str, Cell]:
    subjects = {of: Ours(model, n_sequences, rollback_window=WINDOW, state_dtype=dtype) for of, dtype in STATES.items()}
    for subject in subjects.values():
        subject.rewind(N_PROMPT)
        for _ in range(N_UNTIMED):
            subject.decode()
    bare = Mixerless(torch.full((n_sequences,), 5))
    runs: dict[str, Callable[[], object]] = {of: subject.decode for of, subject in subjects.items()}
    runs["without mixers"] = lambda: model(cast(Step, bare))
    rounds: dict[str, list[float]] = {of: [] for of in runs}
    for _ in range(n_rounds):
        seconds: dict[str, list[float]] = {of: [] for of in runs}
        for _ in range(WINDOW // 2):
            for of, run in runs.items():
                started = time.thread_time()
                run()
                seconds[of].append(time.thread_time() - started)
        for of, found in seconds.items():
            rounds[of].append(1000 * statistics.mean(found))
    step_ms = {of: statistics.median(found) for of, found in rounds.items()}
    ratios = {f"float32 / {of}": step_ms["float32"] / step_ms[of] for of in ("int8", "fp8", "without mixers")}
    return {**step_ms, **ratios}
