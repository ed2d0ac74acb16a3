"""Measures models in bfloat16 and float32 on this processor with its bfloat16 instructions switched off.

torch, oneDNN and numba detect the processor's features once in each process, so a new process does the measuring.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import llvmlite.binding as llvm
import torch

from benchmarks.harness import Report, Samples, interleave
from benchmarks.ours import N_UNTIMED, Ours, draw, prefills, workload
from benchmarks.workloads import CONFIGS, MODELS, save_random
from hybridmem.models import load_model
from hybridmem.models.products.integer_vectors import multiplies_pairs
from hybridmem.models.products.packed import multiplies_bfloat16

_ASKED = 1.05
"""The most that a model in bfloat16 may take of the time of the same model in float32."""

_HIDDEN = ("avx512bf16", "amx-tile", "amx-bf16", "amx-int8")
"""LLVM calls the instructions that multiply bfloat16, and those of AMX, by these names."""


def without_bfloat16(*, quick: bool, models: Sequence[str] = MODELS) -> Report:
    """Measure models in bfloat16 and float32, in turns, in processes where no instruction multiplies bfloat16."""
    report = Report("without_bfloat16")
    report.notes.append(
        "Weights, rows and pages are in bfloat16, products in float32: what a processor without AVX512_BF16 and AMX "
        f"does. {'This one has them' if multiplies_bfloat16() else 'This is one'}."
    )
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            save_random(CONFIGS[name](), folder)
            for table, row in _measure(folder, quick=quick):
                ratio = row["bfloat16"] / row["float32"]
                report.add(table, {"model": name, **row, "bfloat16 / float32": ratio, "asked at most": _ASKED})
    return report


def _measure(folder: str, *, quick: bool) -> list[tuple[str, dict[str, Any]]]:
    """Return title and row of each measurement, from a process in which no instruction multiplies bfloat16."""
    features = llvm.get_host_cpu_features()
    allowed = ",".join(f"{'+' if has and name not in _HIDDEN else '-'}{name}" for name, has in features.items())
    environment = {
        **os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "NUMBA_CPU_FEATURES": allowed,
        "NUMBA_CPU_NAME": llvm.get_host_cpu_name(),
    }  # fmt: skip
    call = f"answer({folder!r}, {torch.get_num_threads()}, quick={quick})"
    code = f"from benchmarks.without_bfloat16 import answer; {call}"
    said = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [(table, row) for table, row in json.loads(said.stdout.splitlines()[-1])]


def answer(folder: str, n_threads: int, *, quick: bool) -> None:
    """Measure a checkpoint in bfloat16 and in float32, and print the rows of the tables as JSON.

    Raises:
        RuntimeError: torch, oneDNN or numba would still use instructions that multiply bfloat16.
    """
    torch.cpu._is_avx512_bf16_supported = lambda: False
    torch.cpu._is_amx_tile_supported = lambda: False
    if multiplies_bfloat16() or multiplies_pairs():
        raise RuntimeError("this processor's products of bfloat16 cannot be hidden; measure on an x86 processor")
    torch.set_num_threads(n_threads)
    models = {dtype: load_model(folder, dtype=dtype, progress=False) for dtype in ("float32", "bfloat16")}
    rows = list[tuple[str, dict[str, Any]]]()
    for n_sequences, n_tokens in workload(quick=quick):
        tokens = draw(n_sequences, n_tokens)
        subjects = {dtype: Ours(model, n_sequences) for dtype, model in models.items()}
        times = interleave(prefills(subjects, tokens), 1 if quick else 5)
        rows.append(("prefill, ms", {"sequences": f"{n_sequences} x {n_tokens}"} | _medians(times)))
        decodes = {dtype: subject.decode for dtype, subject in subjects.items()}
        times = interleave(decodes, 3 if quick else 40, n_warm_up=N_UNTIMED)
        rows.append(("decode, ms a step", {"sequences": f"{n_sequences} after {n_tokens}"} | _medians(times)))
        for subject in subjects.values():
            subject.memory.close_all()
    print(json.dumps(rows))


def _medians(times: Mapping[str, Samples]) -> dict[str, float]:
    return {dtype: samples.median_ms for dtype, samples in times.items()}
