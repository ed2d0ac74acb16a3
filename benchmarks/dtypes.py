"""Measures what 16, 8 and 4 bits cost or save on the CPU, compared with transformers' bfloat16 on the same weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import AutoTokenizer

from benchmarks.harness import Report, interleave
from benchmarks.ours import N_UNTIMED, Ours, draw, prefills, workload
from benchmarks.sparse import answer, draw_dialogues
from benchmarks.workloads import CONFIGS, MODELS, Transformers, save_random
from hybridmem.models import EMBEDDED, LanguageModel, load_model
from hybridmem.models.loading.load import weight_bytes
from hybridmem.models.products.packed import multiplies_bfloat16

_FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "weights": "int8"},
    "int4": {"dtype": "bfloat16", "weights": "int4"},
}
"""How weights are kept, and what `load_model` is given for it."""

_ASKED = {1: 2.0, 8: 2.5, 32: 3.0}
"""Ratios to transformers in bfloat16 that this project wants at least for decode, by sequences; 2.0 for prefill."""


def dtypes(*, quick: bool, models: Sequence[str] = MODELS) -> Report:
    """Measure decode and prefill of our model in each format and of transformers in bfloat16, in turns.

    The share of right answers of the embedded model is measured too.
    """
    report = Report("dtypes")
    report.notes.append(
        f"This processor multiplies bfloat16: {'yes' if multiplies_bfloat16() else 'no'}. int8 and int4 are weights of "
        "a model whose dtype is bfloat16."
    )
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            theirs = save_random(CONFIGS[name](), folder).to(torch.bfloat16)
            ours = {key: _load(folder, key) for key in _FORMATS}
        report.add("bytes of weights", {"model": name} | {key: weight_bytes(model) for key, model in ours.items()})
        for n_sequences, n_tokens in workload(quick=quick):
            tokens = draw(n_sequences, n_tokens)
            subjects = {dtype: Ours(model, n_sequences) for dtype, model in ours.items()}
            peer = Transformers(theirs)
            prompts = prefills(subjects, tokens) | {"transformers": partial(peer.prefill, tokens)}
            for run in prompts.values():
                run()
            decodes = {dtype: subject.decode for dtype, subject in subjects.items()} | {"transformers": peer.decode}
            _add(report, "decode, ms a step", name, f"{n_sequences} after {n_tokens}", decodes,
                 3 if quick else 20, _ASKED[n_sequences], n_warm_up=N_UNTIMED)  # fmt: skip
            _add(report, "prefill, ms", name, f"{n_sequences} x {n_tokens}", prompts, 1 if quick else 3, 2.0)
    _add_answers(report, n_dialogues=10 if quick else 200)
    return report


def _load(folder: str, key: str) -> LanguageModel:
    return load_model(folder, progress=False, **_FORMATS[key])  # type: ignore[arg-type]


def _add(
    report: Report, table: str, model: str, work: str, runs: dict[str, Callable[[], object]], n_rounds: int,
    asked: float, *, n_warm_up: int = 1,
) -> None:  # fmt: skip
    times = {name: samples.median_ms for name, samples in interleave(runs, n_rounds, n_warm_up=n_warm_up).items()}
    report.add(table, {
        "model": model, "sequences": work, **{key: times[key] for key in _FORMATS},
        "transformers, bfloat16": times["transformers"], "float32 / bfloat16": times["float32"] / times["bfloat16"],
        "bfloat16 / int8": times["bfloat16"] / times["int8"], "bfloat16 / int4": times["bfloat16"] / times["int4"],
        "transformers / bfloat16": times["transformers"] / times["bfloat16"], "asked": asked,
    })  # fmt: skip


def _add_answers(report: Report, *, n_dialogues: int) -> None:
    """Add the share of right answers of the embedded model, whose weights were trained in float32."""
    dialogues = draw_dialogues(AutoTokenizer.from_pretrained(EMBEDDED), n_dialogues)
    for key, options in (_FORMATS | {"int8-row": {"dtype": "bfloat16", "weights": "int8-row"}}).items():
        model = load_model("embedded", progress=False, **options)  # type: ignore[arg-type]
        right, _ = answer(model, model.memory_spec, dialogues)
        report.add("answers of the embedded model", {
            "weights": key, "dialogues": n_dialogues, "right, %": 100 * right, "bytes of weights": weight_bytes(model),
        })  # fmt: skip
