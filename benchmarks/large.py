"""Measures a model of three billion parameters: loading, peak resident memory, decoding, and reading as many bytes."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, JambaConfig

from benchmarks.harness import Report
from benchmarks.loading import FORMATS

_ASKED = {"bfloat16": 1.0, "int8": 1.7, "int4": 2.6}
"""Ratios to the step in bfloat16 that this project wants at least, at one sequence."""

_SHARD_BYTES = 1 << 30
_TURNS = 8


def _config(n_layers: int) -> JambaConfig:
    """Return the sizes of Jamba Reasoning 3B: 28 layers of width 2560, two of them attention, and one expert."""
    return JambaConfig(
        vocab_size=65_536, hidden_size=2560, intermediate_size=8192, num_hidden_layers=n_layers,
        num_attention_heads=20, num_key_value_heads=1, attn_layer_period=14, attn_layer_offset=7,
        expert_layer_period=2, expert_layer_offset=1, num_experts=1, num_experts_per_tok=1, mamba_d_state=16,
        mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=160, use_mamba_kernels=False, tie_word_embeddings=True,
    )  # fmt: skip


def large(*, quick: bool) -> Report:
    """Measure a model of 3B parameters: loading, most resident memory, decode; needs 24 GB of memory and disk.

    Weights are random in bfloat16. Each format is measured in a process of its own.
    """
    report = Report("large")
    with tempfile.TemporaryDirectory() as folder:
        n_bytes = _write(_config(2 if quick else 28), Path(folder))
        read_s = _seconds_to_read(n_bytes)
        report.add("bytes and the time to read them once", {
            "bytes of the files": n_bytes, "by sum, ms": read_s["sum"] * 1e3,
            "by half a copy, ms": read_s["copy"] * 1e3,
        })  # fmt: skip
        found = _measure(folder)
        for name, own in found.items():
            step = own["decode 1, ms"]
            report.add("loading and decode", {
                "weights": name, **own, "of reading once": read_s["copy"] * 1e3 / step if name == "bfloat16" else "",
                "bfloat16 / this": found["bfloat16"]["decode 1, ms"] / step, "asked": _ASKED[name],
            })  # fmt: skip
    report.notes.append(
        "Loading is from the page cache; formats decode in turns. Most resident memory is that of the process, with "
        "libraries and a memory of 256 MiB, which comes on top of what is asked. Of reading once: the time that "
        "reading the files' bytes once takes, by half of the fastest of torch's copies, over the step's (asked: 0.8)."
    )
    return report


def _write(config: JambaConfig, folder: Path) -> int:
    """Write random weights of a config's shapes in shards of one GiB, and return how many bytes they have."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    config.dtype, config.architectures = "bfloat16", ["JambaForCausalLM"]
    config.save_pretrained(folder)
    index, total = dict[str, str](), 0
    for i, shard in enumerate(_shards(shapes)):
        save_file(shard, folder / f"model-{i}.safetensors", {"format": "pt"})
        index |= dict.fromkeys(shard, f"model-{i}.safetensors")
        total += sum(tensor.nbytes for tensor in shard.values())
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return total


def _shards(shapes: dict[str, torch.Size]) -> Iterator[dict[str, Tensor]]:
    shard, n_bytes, generator = dict[str, Tensor](), 0, torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        size = 1 if len(shape) < 2 else shape[-1]
        shard[name] = torch.randn(shape, generator=generator).div_(math.sqrt(size)).bfloat16()
        n_bytes += shard[name].nbytes
        if n_bytes >= _SHARD_BYTES:
            yield shard
            shard, n_bytes = {}, 0
    if shard:
        yield shard


def _seconds_to_read(n_bytes: int) -> dict[str, float]:
    """Return the least seconds in which torch sums `n_bytes` bytes, and half of the least in which it copies them."""
    source = torch.ones(min(n_bytes, 1 << 30) // 4)
    target, share = torch.empty_like(source), n_bytes / source.nbytes
    sums, copies = list[float](), list[float]()
    for _ in range(10):
        started = time.perf_counter()
        source.sum()
        middle = time.perf_counter()
        target.copy_(source)
        sums.append(middle - started)
        copies.append((time.perf_counter() - middle) / 2)
    return {"sum": min(sums) * share, "copy": min(copies) * share}


class _Process:
    """Runs `benchmarks.loading.answer` for a checkpoint and a format of weights, in a process of its own."""

    def __init__(self, folder: str, name: str) -> None:
        call = f"answer({folder!r}, {name!r}, {torch.get_num_threads()})"
        code = f"from benchmarks.loading import answer; {call}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str | None) -> Any:
        """Send the process a line, unless that is None, and return its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if line is not None:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"a process for a checkpoint ended with {self._process.wait()} before it answered")
        return json.loads(answer)

    def end(self) -> str:
        """End the input of the process, wait for it, and return what it printed last."""
        said = self._process.communicate()[0]
        if self._process.returncode:
            raise RuntimeError(f"a process for a checkpoint ended with {self._process.returncode}")
        return said


def _measure(folder: str) -> dict[str, dict[str, Any]]:
    """Load the checkpoint in each format, let the models decode in turns, and return the table's values by format.

    Another process does the same beforehand, so that files are in the page cache and kernels are compiled: compiling
    here would add to the measured memory.
    """
    processes, found = dict[str, _Process](), dict[str, dict[str, Any]]()
    for name in FORMATS:
        first = _Process(folder, name)
        for line in (None, "1", "", "4", ""):
            first.ask(line)
        first.end()
        processes[name] = _Process(folder, name)
        found[name] = {"load, s": processes[name].ask(None)}
    for n_sequences in (1, 4):
        seconds: dict[str, list[float]] = {name: process.ask(str(n_sequences)) for name, process in processes.items()}
        for _ in range(_TURNS):
            for name, process in processes.items():
                seconds[name] += process.ask("")
        for name, own in seconds.items():
            found[name][f"decode {n_sequences}, ms"] = statistics.median(own) * 1e3
    return {name: {**found[name], **json.loads(process.end())} for name, process in processes.items()}
