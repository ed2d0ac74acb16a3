"""Measures what 16 bits cost or save on the CPU: the same weights in float32 and bfloat16, beside transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

import torch

from benchmarks.harness import Report, interleave
from benchmarks.workloads import CONFIGS, MODELS, Ours, Transformers, draw, save_random
from models import load_model
from models.layers.packed import multiplies_bfloat16
from models.loading.load import weight_bytes

_WORK = ((1, 512), (8, 64), (32, 64))
_ASKED = {1: 2.0, 8: 2.5, 32: 3.0}
"""Ratios to transformers in bfloat16 that this project wants at least for decode, by sequences; 2.0 for prefill."""


def dtypes(*, quick: bool, models: Sequence[str] = MODELS) -> Report:
    """Measure decode steps and prefill of ours in float32 and bfloat16 and of transformers in bfloat16, in turns."""
    report = Report("dtypes")
    report.notes.append(f"This processor multiplies bfloat16: {'yes' if multiplies_bfloat16() else 'no'}.")
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            theirs = save_random(CONFIGS[name](), folder).to(torch.bfloat16)
            ours = {dtype: load_model(folder, dtype=dtype, progress=False) for dtype in ("float32", "bfloat16")}
        report.add("bytes of weights", {"model": name} | {key: weight_bytes(model) for key, model in ours.items()})
        for n_sequences, n_tokens in ((1, 16), (8, 8)) if quick else _WORK:
            tokens = draw(n_sequences, n_tokens)
            subjects = {dtype: Ours(model, n_sequences) for dtype, model in ours.items()}
            peer = Transformers(theirs)
            prefills: dict[str, Callable[[], object]] = {
                dtype: lambda subject=subject: subject.prefill(tokens)  # type: ignore[misc]  # noqa: B023
                for dtype, subject in subjects.items()
            }
            prefills["transformers"] = lambda: peer.prefill(tokens)  # noqa: B023
            for run in prefills.values():
                run()
            decodes = {dtype: subject.decode for dtype, subject in subjects.items()} | {"transformers": peer.decode}
            _add(report, "decode, ms a step", name, f"{n_sequences} after {n_tokens}", decodes,
                 3 if quick else 20, _ASKED[n_sequences])  # fmt: skip
            _add(report, "prefill, ms", name, f"{n_sequences} x {n_tokens}", prefills, 1 if quick else 3, 2.0)
    return report


def _add(
    report: Report, table: str, model: str, work: str, runs: dict[str, Callable[[], object]], n_rounds: int,
    asked: float,
) -> None:  # fmt: skip
    times = {name: samples.median_ms for name, samples in interleave(runs, n_rounds, n_warm_up=1).items()}
    report.add(table, {
        "model": model, "sequences": work, **{f"ours, {dtype}": times[dtype] for dtype in ("float32", "bfloat16")},
        "transformers, bfloat16": times["transformers"], "float32 / bfloat16": times["float32"] / times["bfloat16"],
        "transformers / ours": times["transformers"] / times["bfloat16"], "asked": asked,
    })  # fmt: skip
