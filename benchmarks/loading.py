"""Loads a checkpoint and decodes in a process of its own, whose resident memory is then that of one model."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.ours import Ours, draw
from hybridmem.models import LanguageModel, load_model
from hybridmem.models.loading.load import weight_bytes

FORMATS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "weights": "int8"},
    "int4": {"dtype": "bfloat16", "weights": "int4"},
}
_ASKED_RESIDENT, _MEMORY_BYTES = 1.15, 256 << 20
"""The most resident bytes that are wanted for each byte of weights, and the bytes of the memory, which come on top."""

_STEPS = 8
"""Steps of a turn."""


def load(folder: str, name: str, n_threads: int) -> tuple[LanguageModel, float]:
    """Load the checkpoint in a format; return the model, and the seconds that loading took."""
    torch.set_num_threads(n_threads)
    started = time.perf_counter()
    return load_model(folder, progress=False, **FORMATS[name]), time.perf_counter() - started  # type: ignore[arg-type]


def answer(folder: str, name: str, n_threads: int) -> None:
    """Load the checkpoint, then answer lines of the standard input in JSON, one line each.

    A line with a number opens that many sequences with prompts. An empty line decodes for one turn, and is answered by
    the seconds of the turn's steps. The end of the input is answered by the bytes of the process.
    """
    model, seconds = load(folder, name, n_threads)
    _say(seconds)
    subject: Ours | None = None
    for line in map(str.strip, sys.stdin):
        if line:
            if subject is not None:
                subject.memory.close_all()
            subject = Ours(model, int(line), budget="256MiB")
            subject.prefill(draw(int(line), 64))
        _say([] if subject is None or line else [_step(subject) for _ in range(_STEPS)])
    n_bytes, status = weight_bytes(model), Path("/proc/self/status").read_text()
    peak_bytes = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    _say({
        "bytes": n_bytes, "most resident / bytes": peak_bytes / n_bytes,
        "resident asked": _ASKED_RESIDENT + _MEMORY_BYTES / n_bytes,
    })  # fmt: skip


def _step(subject: Ours) -> float:
    started = time.perf_counter()
    subject.decode()
    return time.perf_counter() - started


def _say(found: object) -> None:
    print(json.dumps(found), flush=True)
