"""Compiling ahead: nothing is left for later, and whoever waits is told why."""

from __future__ import annotations

import logging
import subprocess
import sys
import time

import pytest

from memory.kernels.cpu import warm_up as package_warm_up
from memory.kernels.cpu.warm_up import warm_up

module = sys.modules["memory.kernels.cpu.warm_up"]

EVERY_KERNEL = """
from memory import HybridMemory
from memory.kernels.cpu import attention, channel_states, matrix_states, norms, recurrences, rows, warm_up
from models import load_model

kernels = [attention._attend_few, recurrences._causal_conv, recurrences._selective_scan]
kernels += [rows._read_rows, rows._write_rows]
kernels += [channel_states._softplus, channel_states._linear_scan, channel_states._wkv4]
kernels += [matrix_states._matrix_scan, norms._rms_norm]
assert not any(kernel.signatures for kernel in kernels)
warm_up()
assert [len(kernel.signatures) for kernel in kernels] == [1] * len(kernels)
model = load_model("embedded")
memory = HybridMemory(model.memory_spec, "64MiB", rollback_window=8)
a, b = memory.open(), memory.open()
for requests in ({a: range(1, 60), b: [3]}, {a: [5]}, {a: [6], b: [7]}, {b: range(1, 40)}):
    with memory.step({s: list(t) for s, t in requests.items()}) as step:
        model(step)
    memory.rollback(a, to=a.length - 1)
assert [len(kernel.signatures) for kernel in kernels] == [1] * len(kernels), "a kernel was compiled for other types"
"""


def test_nothing_is_compiled_after_warming_up() -> None:
    outcome = subprocess.run([sys.executable, "-c", EVERY_KERNEL], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


def test_a_long_wait_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_is_warm", False)
    monkeypatch.setattr(module, "_SILENT_SECONDS", 0.01)
    monkeypatch.setattr(module, "_run_all", lambda: time.sleep(0.2))
    with caplog.at_level(logging.WARNING, "memory"):
        assert warm_up() >= 0.2
    assert "compiling CPU kernels" in caplog.text and "hybrid-memory warmup" in caplog.text
    assert package_warm_up() == 0.0, "once is enough"


def test_a_short_one_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_is_warm", False)
    monkeypatch.setattr(module, "_run_all", lambda: None)
    warm_up()
    assert not caplog.records


def test_torch_keeps_its_number_of_threads() -> None:
    code = """
import torch
torch.set_num_threads(1)
assert torch.get_num_threads() == 1, "what is counted first here, torch does not ask OpenMP for again"
import numba.np.ufunc.parallel
from memory import AttentionSpec, HybridMemory, MemorySpec
HybridMemory(MemorySpec(((AttentionSpec(1, 1, 8),),), vocab_size=8), "1MiB")
assert numba.np.ufunc.parallel._is_initialized and torch.get_num_threads() == 1, torch.get_num_threads()
"""
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
