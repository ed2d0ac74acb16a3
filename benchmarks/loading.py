"""Loads a checkpoint and decodes, in a process that imports no other library's models: all that is resident counts."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.ours import Ours, draw
from models import LanguageModel, load_model
from models.loading.load import weight_bytes

FORMATS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "weights": "int8"},
    "int4": {"dtype": "bfloat16", "weights": "int4"},
}
_ASKED_RESIDENT, _MEMORY_BYTES = 1.15, 256 << 20
"""The most resident bytes that are wanted for each byte of weights, and the bytes of the memory, which come on top."""

_STEPS = 20


def load(folder: str, name: str, n_threads: int) -> dict[str, Any]:
    """Load the checkpoint in a format; return seconds and bytes."""
    return _loaded(folder, name, n_threads)[1]


def _loaded(folder: str, name: str, n_threads: int) -> tuple[LanguageModel, dict[str, Any]]:
    torch.set_num_threads(n_threads)
    started = time.perf_counter()
    model = load_model(folder, progress=False, **FORMATS[name])  # type: ignore[arg-type]
    return model, {"load, s": time.perf_counter() - started, "bytes": weight_bytes(model)}


def measure(folder: str, name: str, n_threads: int) -> dict[str, Any]:
    """Load the checkpoint in a format, and decode; return what the table of formats shows."""
    model, found = _loaded(folder, name, n_threads)
    for n_sequences in (1, 4):
        subject = Ours(model, n_sequences, budget="256MiB")
        subject.prefill(draw(n_sequences, 64))
        seconds = list[float]()
        for _ in range(_STEPS):
            started = time.perf_counter()
            subject.decode()
            seconds.append(time.perf_counter() - started)
        found[f"decode {n_sequences}, ms"] = statistics.median(seconds) * 1e3
        subject.memory.close()
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    return {
        **found, "most resident / bytes": peak_kib * 1024 / found["bytes"],
        "resident asked": _ASKED_RESIDENT + _MEMORY_BYTES / found["bytes"],
    }  # fmt: skip
