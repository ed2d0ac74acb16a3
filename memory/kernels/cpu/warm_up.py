"""Compiles the CPU kernels before they are needed, several at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.staging import place
from hybridmem.memory.kernels.cpu import progress
from hybridmem.memory.kernels.cpu.attention import paged_attention
from hybridmem.memory.kernels.cpu.channel_states import linear_scan, softplus, wkv4
from hybridmem.memory.kernels.cpu.compiled import NotCompiledError, is_kept, on_a_miss
from hybridmem.memory.kernels.cpu.eight_bit_states import SHORT
from hybridmem.memory.kernels.cpu.mamba2 import SSDLayer
from hybridmem.memory.kernels.cpu.matrix_states import matrix_scan
from hybridmem.memory.kernels.cpu.norms import norm_parts, rms_norm
from hybridmem.memory.kernels.cpu.page_choice import choose_pages
from hybridmem.memory.kernels.cpu.recurrences import causal_conv, selective_scan
from hybridmem.memory.kernels.cpu.row_choice import choose_rows
from hybridmem.memory.kernels.cpu.rows import gather_rows, prepare, read_rows, write_rows_
from hybridmem.memory.kernels.cpu.stabiliser import stabilise
from hybridmem.memory.kernels.signature import FoldedRows, PageChoice, PagedBatch, Scoring, StateSlots, Tail
from hybridmem.memory.quantization import Float8

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_states, _offsets, _cu = torch.zeros(64), torch.zeros(1, dtype=torch.int64), np.arange(2)
_a, _codes = torch.zeros(3, 2), torch.zeros(64, dtype=torch.uint8)


def _slots(flat: Tensor, *shape: int) -> StateSlots:
    return StateSlots(place(_cu, torch.device("cpu")), flat, _offsets, _offsets, shape, 0.0)


def _batch() -> PagedBatch:
    return PagedBatch(_cu, np.ones(1, np.int64), _offsets, _cu, page_tokens=1)


def _attend(flat: Tensor, folded: FoldedRows | None = None) -> None:
    paged_attention(flat[:2].view(1, 1, 2), flat, flat, _batch(), 1, Scoring(1.0), folded)


def _attend_folded(flat: Tensor) -> None:
    shapes = ((1, 1, 2), (1, 1, 2))
    _attend(flat, FoldedRows(Float8(), shapes, (_codes, _codes), _offsets, _cu, np.ones(1, np.int64), 2))


def _choose_pages(flat: Tensor) -> None:
    choice = PageChoice(_offsets, _cu, 0, np.ones(1, np.int64), _cu)
    choose_pages(flat[:2].view(1, 1, 2), flat, flat, choice, 1)


def _choose_rows(flat: Tensor) -> None:
    choose_rows(flat[:2].view(1, 1, 2), _states[:1].view(1, 1), flat, _batch(), 1, 1.0)


def _copy_rows(flat: Tensor) -> None:
    write_rows_(flat, _offsets, flat[:2].view(1, 2))
    read_rows(flat, _offsets, (2,), 0.0)
    gather_rows(flat, _batch(), 0, 1, 2, 0, 1)


def _norm(flat: Tensor) -> None:
    rms_norm(flat[:2].view(1, 2), None, 1.0)
    norm_parts(flat[:2].view(1, 2), flat[:2], 1.0, _cu[1:] + 1)


def _scan_channels(flat: Tensor) -> None:
    x, b, bias = flat[:2].view(1, 2), flat[:3].view(1, 3), flat[:2]
    selective_scan(x, x, bias, b, b, _a, _states[:2], _slots(_states, 3, 2))


def _scan_matrices(_: Tensor) -> None:
    x = _states[:2].view(1, 1, 2)
    matrix_scan(x, x, x, x[:, :, 0], None, _slots(_states, 1, 2, 2))


def _scan_after_convolving(flat: Tensor) -> None:
    x, state = _states[:1], _slots(_states, 1, 1, 1)
    layer = SSDLayer(_states[:6].view(2, 3), None, x, x, None, (0.0, 1.0), 1, activation=True)
    layer(flat[:4].view(1, 4), _slots(flat, 1, 3), state)


def _scan_three_sums(_: Tensor) -> None:
    x, own = _states[:2].view(1, 2), _slots(_states, 2)
    wkv4(x, x, _states[:2], _states[:2], (own, own, own))


def _read_in_8_bits(flat: Tensor, codes: Tensor) -> None:
    """Run the kernels for states of 8 bits over a short and a long segment, and convolve behind a tail."""
    for n in (1, SHORT + 1):
        rings = flat.new_zeros(16), flat.new_zeros(1), _states[:1]
        tail = Tail(rings, (_offsets,) * 3, (_offsets,) * 3, 1, _offsets, _offsets, _offsets + n)
        cu_rows, targets = place(np.array([0, n]), torch.device("cpu")), _offsets + 20
        slots = StateSlots(cu_rows, prepare(codes), _offsets, targets, (1, 1, 16), 0.0, tail)
        x = torch.zeros(n, 1, 16)
        matrix_scan(x, x, x[:, :, :1], x[:, :, 0], None, slots)
    _convolve_behind_tail(flat)


def _scan_channels_in_8_bits(flat: Tensor, codes: Tensor) -> None:
    tail = Tail((flat[:2], flat[:2], flat[:3]), (_offsets,) * 3, (_offsets,) * 3, 1, _offsets, _offsets, _offsets + 1)
    slots = _slots(codes, 3, 2)._replace(flat=prepare(codes), targets=_offsets + 14, tail=tail)
    x, b = flat[:2].view(1, 2), flat[:3].view(1, 3)
    selective_scan(x, x, flat[:2], b, b, _a, _states[:2], slots)
    _convolve_behind_tail(flat)


def _convolve_behind_tail(flat: Tensor) -> None:
    tail = Tail((flat,), (_offsets,), (_offsets,), 1, _offsets, _offsets, _offsets + 1)
    causal_conv(flat[:2].view(1, 2), flat[:4].view(2, 2), None, _slots(flat, 1, 2)._replace(tail=tail))


_RUNS: dict[str, tuple[float, Callable[[Tensor], object]]] = {
    "int8_states": (22, lambda flat: _read_in_8_bits(flat, torch.zeros(64, dtype=torch.int8))),
    "float8_states": (22, lambda flat: _read_in_8_bits(flat, torch.zeros(64).to(torch.float8_e4m3fn))),
    "ssd": (9.5, _scan_after_convolving),
    "int8_channels": (6, lambda flat: _scan_channels_in_8_bits(flat, torch.zeros(64, dtype=torch.int8))),
    "float8_channels": (6, lambda flat: _scan_channels_in_8_bits(flat, torch.zeros(64).to(torch.float8_e4m3fn))),
    "folded_rows": (8.5, _attend_folded),
    "matrix_scan": (6.5, _scan_matrices),
    "paged_attention": (6, _attend),
    "choose_rows": (4, _choose_rows),
    "choose_pages": (3, _choose_pages),
    "wkv4": (3, _scan_three_sums),
    "selective_scan": (2.5, _scan_channels),
    "causal_conv": (2, lambda flat: causal_conv(flat[:2].view(1, 2), flat[:4].view(2, 2), None, _slots(flat, 1, 2))),
    "linear_scan": (1, lambda _: linear_scan(_states[:2].view(1, 2), _states[:2].view(1, 2), _slots(_states, 2))),
    "rms_norm": (1.5, _norm),
    "stabilise": (1, lambda _: stabilise(_states[:2].view(1, 2), _states[:2].view(1, 2), _slots(_states, 2))),
    "rows": (1, _copy_rows),
    "softplus": (0.5, lambda flat: softplus(flat[:2].view(1, 2), _states[:2])),
}
"""Maps a name to the seconds that its kernels take to compile, and a function that runs them on tiny inputs.

The longest come first. The function takes numbers of the memory's dtype. States are in float32.
"""

NAMES = tuple(_RUNS)
"""The names of what can be compiled ahead.

They are the functions of `Kernels`, and six more: "rows" copies rows, "folded_rows" is attention over what a storage
keeps, and "int8_states", "float8_states", "int8_channels" and "float8_channels" run over matrices and channels of 8
bits.
"""

_HELPER_SECONDS = 4
"""How many seconds of compiling are worth starting another process, which takes two seconds."""

_warm: set[tuple[str, torch.dtype]] = set()


def warm_up(names: Iterable[str] = NAMES, dtype: torch.dtype = torch.float32) -> float:
    """Compile those of these kernels that are missing for rows of `dtype`, and load the others from disk.

    Returns the seconds that it took.

    A new memory calls this with the names that its spec needs, so that no step has to wait for the compiler. As many
    processes compile at once as there are cores.
    """
    started = time.perf_counter()
    asked = set(names)
    wanted = [name for name in NAMES if name in asked and (name, dtype) not in _warm]
    if missing := [name for name in wanted if not _has_run(name, dtype, "skip")]:
        _compile(missing, dtype)
    _warm.update((name, dtype) for name in wanted)
    return time.perf_counter() - started


def _compile(names: list[str], dtype: torch.dtype) -> None:
    """Compile these kernels, the slowest first, while helper processes begin with the fastest. Helpers may fail."""
    progress.tell(names[0])
    seconds = sum(_RUNS[name][0] for name in names)
    n_helpers = min(_n_cores(), len(names), int(seconds / _HELPER_SECONDS)) - 1 if is_kept() else 0
    helpers = [_start_helper(names[i + 1 :] + names[: i + 1], dtype) for i in range(n_helpers)]
    try:
        left = [name for name in names if not _has_run(name, dtype, "skip if another does")]
        for name in left:
            _has_run(name, dtype, "compile")
    except BaseException:
        for helper in helpers:
            helper.terminate()
        raise
    finally:
        for helper in helpers:
            helper.wait()
        progress.clear()


def compile_alone(dtype: str, *names: str) -> None:
    """Compile the kernels of those names that no other process compiles now."""
    for name in names:
        _has_run(name, _DTYPES[dtype], "skip if another does")


def _start_helper(names: list[str], dtype: torch.dtype) -> subprocess.Popen[bytes]:
    code = "import sys; from hybridmem.memory.kernels.cpu.warm_up import compile_alone; compile_alone(*sys.argv[1:])"
    path = os.pathsep.join(folder or os.curdir for folder in sys.path)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(dtype).removeprefix("torch."), *names], env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _has_run(name: str, dtype: torch.dtype, rule: Literal["compile", "skip", "skip if another does"]) -> bool:
    try:
        with on_a_miss(rule):
            _RUNS[name][1](torch.zeros(64, dtype=dtype))
    except NotCompiledError:
        return False
    return True


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
