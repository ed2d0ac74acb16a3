"""Measures how long moving a session to another memory by a file takes, compared with writing and reading its bytes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Report, Samples
from benchmarks.ours import VOCAB
from benchmarks.workloads import both_models
from hybridmem.memory import HybridMemory
from hybridmem.memory.storage.local_files import begin_flush

N_TOKENS = 4096
TABLE = "a session of 4,096 tokens moves (120M Jamba)"
_PIECE_BYTES = 1 << 20


def move(report: Report, *, n_rounds: int) -> None:
    """Add a row for the move, and two for plain files of as many bytes, flushed at the end or early.

    The three are measured in turns. Before each measurement, its file is removed, because a store never overwrites a
    file, and the disk finishes its pending writes, because they would slow the next measurement.
    """
    with both_models("jamba") as (model, _), tempfile.TemporaryDirectory() as folder:
        here, there = (HybridMemory(model.memory_spec, "1GiB") for _ in range(2))
        tokens = np.random.default_rng(0).integers(0, VOCAB, N_TOKENS)
        sequence = here.open()
        here.run(model, {sequence: tokens}, max_tokens=512)
        path, plain = Path(folder) / "session.safetensors", Path(folder) / "plain"

        def move() -> None:
            here.archive.pack(sequence)(str(path))
            there.close(there.archive.open(there.archive.read(path)))

        move()
        content = path.read_bytes()
        samples = _alternate(
            {
                "the session moves": move,
                "its bytes, by write, fsync, rename and read": lambda: _write_and_read(plain, content),
                "the same, the disk beginning early": lambda: _write_and_read(plain, content, begins_early=True),
            },
            (path, plain),
            n_rounds,
        )
        move()
        moved = there.archive.open(there.archive.read(path))
        is_equal = bool(torch.equal(there.run(model, {moved: [5]}), here.run(model, {sequence: [5]})))
    ours = next(iter(samples.values()))
    for name, own in samples.items():
        report.add(TABLE, {
            "what": name, "MiB": len(content) / 2**20, "median, ms": own.median_ms, "eight in ten, ms": own.spread,
            "the move takes": ours.median_ms / own.median_ms,
        })  # fmt: skip
    report.add("its next token", {"logits are the same, bit for bit": str(is_equal), "rounds": n_rounds})


def _write_and_read(path: Path, content: bytes, *, begins_early: bool = False) -> None:
    """Write a file atomically and durably, and read it: the least that any program has to do."""
    beside = path.with_suffix(".part")
    with beside.open("wb", buffering=0) as file:
        if begins_early:
            for at in range(0, len(content), _PIECE_BYTES):
                n_bytes = file.write(memoryview(content)[at : at + _PIECE_BYTES])
                begin_flush(file, at, n_bytes)
        else:
            file.write(content)
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    path.read_bytes()


def _alternate(runs: dict[str, Callable[[], None]], files: tuple[Path, ...], n_rounds: int) -> dict[str, Samples]:
    """Time each run once a round, one after the other. Before each run, its files are removed and the disk is idle."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(n_rounds + 2):
        for name, run in runs.items():
            for file in files:
                file.unlink(missing_ok=True)
            os.sync()
            started = time.perf_counter()
            run()
            if n >= 2:
                seconds[name].append(time.perf_counter() - started)
    return {name: Samples(own) for name, own in seconds.items()}
