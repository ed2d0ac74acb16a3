"""Measures how long each CPU kernel takes to compile, and how long all kernels of a model take."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Report
from hybridmem.memory.build import compiled_ahead
from hybridmem.memory.kernels.cpu.warm_up import NAMES
from hybridmem.models import load_model

_ALONE = """
import sys, time
import torch
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.warm_up import compile_alone, warm_up

compiled()(lambda x: x + x)(1)  # what numba sets up at the first compile of a process is no kernel's own time
started = time.perf_counter()
compile_alone("float32", *sys.argv[2:]) if sys.argv[1] == "alone" else warm_up(sys.argv[2:])
print(time.perf_counter() - started)
"""


def compiling(*, quick: bool) -> Report:
    """Measure each kernel in a process of its own, with an empty cache and with the compiled kernel on disk."""
    report = Report("compile")
    for name in ("rows", "softplus") if quick else NAMES:
        report.add("kernels", {"kernels": name, **_times("alone", [name])})
    if not quick:
        needed = sorted(compiled_ahead(load_model("embedded").memory_spec))
        for title, names in (("embedded model", needed), ("all", list(NAMES))):
            for how in ("alone", "with helpers"):
                report.add("sets", {"set": title, "processes": how, **_times(how, names)})
    report.notes.append("alone: in one process. Loaded: from disk, in a second process.")
    return report


def _times(how: str, names: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        compiled_s, loaded_s = (_seconds(folder, how, names) for _ in range(2))
        n_bytes = sum(path.stat().st_size for path in Path(folder).glob("kernels/*/*"))
    return {"compiled, s": compiled_s, "loaded, s": loaded_s, "MB": n_bytes / 1e6}


def _seconds(folder: str, how: str, names: list[str]) -> float:
    environment = os.environ | {"HYBRID_MEMORY_CACHE": folder}
    command = [sys.executable, "-c", _ALONE, how, *names]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
