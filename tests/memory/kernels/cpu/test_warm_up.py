"""Compiling ahead leaves nothing for later, and tells those who wait why they wait."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridmem.memory import AttentionSpec, MemorySpec
from hybridmem.memory.build import compiled_ahead
from hybridmem.memory.eviction import Quest
from hybridmem.memory.kernels.cpu import progress
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.warm_up import warm_up
from hybridmem.memory.quantization import Float8
from hybridmem.memory.recurrences.mamba1 import mamba1_spec
from hybridmem.memory.recurrences.mlstm import mlstm_spec
from hybridmem.memory.recurrences.rwkv4 import rwkv4_spec
from hybridmem.memory.specs import LayerSpec
from tests.extent import IS_LONG, only_in_long

module = sys.modules["hybridmem.memory.kernels.cpu.warm_up"]

EVERY_KERNEL = """
import sys
from hybridmem.memory import HybridMemory
from hybridmem.memory.kernels.cpu import channel_states, mamba2, matrix_states, norms, query_attention, recurrences
from hybridmem.memory.kernels.cpu import rows, stabiliser, warm_up
from hybridmem.models import load_model

kernels = [query_attention._attend_all, recurrences.convolve_at, recurrences.scan_at]
kernels += [rows._read_rows, rows._write_rows, rows._gather_rows]
kernels += [channel_states.softplus_rows, channel_states._linear_scan, channel_states._wkv4]
kernels += [stabiliser._stabilise, matrix_states.scan_states, norms._rms_norm, mamba2._ssd]
assert not any(kernel.signatures for kernel in kernels)
module = sys.modules[warm_up.__module__]
module._n_cores = lambda: 1  # Other tests run beside this one: a helper would only wait.
warm_up([name for name in module.NAMES if "--all" in sys.argv or not name.startswith("float8")])
compiled = [len(kernel.signatures) for kernel in kernels]  # two of one that another contains, if this process made both
assert all(compiled)
model = load_model("embedded")
memory = HybridMemory(model.memory_spec, "64MiB", rollback_window=8)
a, b = memory.open(), memory.open()
for requests in ({a: range(1, 60), b: [3]}, {a: [5]}, {a: [6], b: [7]}, {b: range(1, 40)}):
    with memory.step({s: list(t) for s, t in requests.items()}) as step:
        model(step)
    memory.rollback(a, to=a.length - 1)
assert [len(kernel.signatures) for kernel in kernels] == compiled, "a kernel was compiled for other types"
"""


@only_in_long
def test_nothing_is_compiled_after_warming_up() -> None:
    """By default, kernels for states in 8-bit floats are left out: only the long form uses and compiles them."""
    command = [sys.executable, "-c", EVERY_KERNEL, *(["--all"] if IS_LONG else [])]
    outcome = subprocess.run(command, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


IN_8_BITS = """
import torch
from hybridmem.memory import HybridMemory, MemorySpec
from hybridmem.memory.kernels.cpu import eight_bit_channels, eight_bit_rows, eight_bit_states
from hybridmem.memory.kernels.cpu import tail_matrices, tail_states
from hybridmem.memory.recurrences import SSD, CausalConv, SSDShape
from hybridmem.memory.recurrences.registry import FAMILIES

generator = torch.Generator().manual_seed(1)
shape = SSDShape(2, 3, 1, 16, 4)
weights = [torch.randn(size, generator=generator) for size in (2, 2, 2)]
ssd = SSD(shape, CausalConv(torch.randn(4, 38), torch.randn(38)), weights[0], -weights[1].exp(), weights[2])
mamba, recurrence = FAMILIES["mamba1"].example(generator)
memory = HybridMemory(MemorySpec(((shape.spec(),), (mamba,)), 9), "1MiB", state_dtype="int8", rollback_window=16)
kernels = [eight_bit_states.multiply_keys, eight_bit_states.read_states, eight_bit_rows.decode, eight_bit_rows.encode]
kernels += [eight_bit_channels._decode, eight_bit_channels._encode]
kernels += [tail_states.convolve, tail_states.scan_channels, tail_matrices.scan_matrices]
compiled = [len(kernel.signatures) for kernel in kernels]
assert all(compiled), compiled
sequence = memory.open()
for n in (40, *[1] * 20, 3):
    with memory.step({sequence: [1] * n}) as step:
        step.recur(0, torch.randn(n, 40), ssd)
        step.recur(1, torch.randn(n, 6), recurrence)
assert [len(kernel.signatures) for kernel in kernels] == compiled, "a kernel was compiled for other types"
"""


@only_in_long
def test_nothing_is_compiled_after_warming_up_for_8_bits() -> None:
    outcome = subprocess.run([sys.executable, "-c", IN_8_BITS], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return two kernels that compile quickly, in a cache of their own. Their calls are noted."""
    monkeypatch.setenv("HYBRID_MEMORY_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_warm", set())
    monkeypatch.setattr(progress, "_has_told", False)
    kernel, ran = compiled()(lambda x: x + x), list[str]()
    monkeypatch.setattr(
        module,
        "_RUNS",
        {name: (0.1, lambda _, x=x, name=name: (kernel(x), ran.append(name))) for name, x in (("a", 1), ("b", 1.0))},
    )
    monkeypatch.setattr(module, "NAMES", ("a", "b"))
    return ran


def test_a_wait_is_announced_and_only_what_is_asked_for_is_compiled(
    toys: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "memory"):
        warm_up(["a"])
    assert toys == ["a"] and len(caplog.records) == 1
    assert "compiling CPU kernels" in caplog.text and "hybrid-memory warmup" in caplog.text
    warm_up(["a", "b"])
    assert toys == ["a", "b"], "once is enough"


def test_what_is_on_disk_is_loaded_without_a_word(
    toys: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warm_up(["a", "b"])
    caplog.clear()
    monkeypatch.setattr(module, "_warm", set())
    monkeypatch.setattr(progress, "_has_told", False)
    warm_up(["a", "b"])
    assert not caplog.records and toys == ["a", "b"] * 2


def test_a_terminal_shows_what_is_compiled(toys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    warm_up(["a"])
    assert "once: a …" in terminal.getvalue() and terminal.getvalue().endswith("\r\x1b[2K")


def test_a_notebook_has_nothing_in_red(
    toys: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_is_notebook", lambda: True)
    warm_up(["a", "b"])
    written = capsys.readouterr()
    assert written.out.count("compiling CPU kernels") == 1 and not written.err


@only_in_long
def test_helpers_take_from_the_other_end(tmp_path: Path) -> None:
    """Two processes together compile the whole list once. Neither compiles what the other one has compiled."""
    code = """
import sys
from hybridmem.memory.kernels.cpu import warm_up
module = sys.modules["hybridmem.memory.kernels.cpu.warm_up"]
module._n_cores, module._HELPER_SECONDS = lambda: 2, 0.1
warm_up(["softplus", "linear_scan"])
"""
    environment = os.environ | {"HYBRID_MEMORY_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, stderr=subprocess.DEVNULL)
    assert sorted(path.name.rpartition("-")[0] for path in tmp_path.glob("kernels/*/*")) == [
        "channel_states._linear_scan",
        "channel_states.softplus_rows",
    ]


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (AttentionSpec(1, 1, 8), {"paged_attention"}),
        (AttentionSpec(1, 1, 8, storage=Float8()), {"paged_attention", "folded_rows"}),
        (AttentionSpec(1, 1, 8, policy=Quest(64)), {"paged_attention", "choose_pages"}),
        (mamba1_spec(8, 4, 4), {"selective_scan", "causal_conv"}),
        (rwkv4_spec(8), {"wkv4"}),
        (mlstm_spec(2, 4, 4), {"stabilise", "matrix_scan", "softplus"}),
    ],
)
def test_a_spec_says_what_it_needs(layers: LayerSpec, names: set[str]) -> None:
    assert compiled_ahead(MemorySpec(((layers,),), vocab_size=8)) == names | {"rows", "rms_norm"}


@only_in_long
def test_torch_keeps_its_number_of_threads() -> None:
    code = """
import torch
torch.set_num_threads(1)
assert torch.get_num_threads() == 1, "what is counted first here, torch does not ask OpenMP for again"
import numba.np.ufunc.parallel
from hybridmem.memory import AttentionSpec, HybridMemory, MemorySpec
HybridMemory(MemorySpec(((AttentionSpec(1, 1, 8),),), vocab_size=8), "1MiB")
assert numba.np.ufunc.parallel._is_initialized and torch.get_num_threads() == 1, torch.get_num_threads()
"""
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


@only_in_long
def test_every_kernel_is_kept_so_the_next_process_compiles_nothing() -> None:
    """Machine code that holds addresses of its process cannot be kept."""
    warm_up()
    code = (
        "import torch\n"
        "from hybridmem.memory.kernels.cpu import warm_up\n"
        "module = __import__('sys').modules['hybridmem.memory.kernels.cpu.warm_up']\n"
        "assert [n for n in module.NAMES if not module._has_run(n, torch.float32, 'skip')] == []\n"
        "print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr


def test_a_compiler_that_fails_takes_its_helpers_along(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[str]()

    class Helper:
        def terminate(self) -> None:
            ended.append("terminated")

        def wait(self) -> None:
            ended.append("waited for")

    def fail(name: str, dtype: torch.dtype, rule: str) -> bool:
        if rule == "compile":
            raise ZeroDivisionError
        return False

    monkeypatch.setattr(module, "_has_run", fail)
    monkeypatch.setattr(module, "_start_helper", lambda *_: Helper())
    monkeypatch.setattr(module, "_n_cores", lambda: 3)
    monkeypatch.setattr(module, "is_kept", lambda: True)
    monkeypatch.setattr(module, "_HELPER_SECONDS", 0.01)
    with pytest.raises(ZeroDivisionError):
        warm_up(module.NAMES[:3], torch.float64)
    assert ended == ["terminated", "terminated", "waited for", "waited for"]
