"""Measures what `reproducible=True` costs on a CPU: decode steps and prompts, against the same model without it.

Both models have the same random weights of 120M parameters. Their runs are interleaved, so that other work of the
machine slows both equally.
"""

from __future__ import annotations

import tempfile

from benchmarks.harness import Cell, Report, Samples, interleave
from benchmarks.ours import N_UNTIMED, Ours, draw, prefills
from benchmarks.workloads import CONFIGS, MODELS, save_random
from hybridmem.models import load_model

_ROUNDS = 40


def reproducible(*, quick: bool) -> Report:
    """Measure decode steps of 1, 8 and 32 sequences and prefills, with and without the option, in six models."""
    report = Report("reproducible")
    for name in MODELS[:2] if quick else MODELS:
        with tempfile.TemporaryDirectory() as folder:
            save_random(CONFIGS[name](), folder)
            models = {
                "default": load_model(folder, progress=False),
                "reproducible": load_model(folder, progress=False, reproducible=True),
            }
        row: dict[str, Cell] = {"model": name}
        for n in (1, 8) if quick else (1, 8, 32):
            subjects = {which: Ours(model, n) for which, model in models.items()}
            for subject in subjects.values():
                subject.rewind(64)
            times = interleave(
                {which: subject.decode for which, subject in subjects.items()}, 10 if quick else _ROUNDS,
                n_warm_up=N_UNTIMED,
            )  # fmt: skip
            row |= {f"decode {n}, ms": times["default"].median_ms, f"decode {n}, ratio": _ratio(times)}
        for n, n_tokens in ((1, 64),) if quick else ((1, 512), (8, 64)):
            subjects = {which: Ours(model, n) for which, model in models.items()}
            times = interleave(prefills(subjects, draw(n, n_tokens)), 3 if quick else 8)
            row |= {f"{n} x {n_tokens}, ms": times["default"].median_ms, f"{n} x {n_tokens}, ratio": _ratio(times)}
        report.add("time without the option, and with it as a multiple", row)
    return report


def _ratio(times: dict[str, Samples]) -> float:
    return times["reproducible"].median_ms / times["default"].median_ms
