"""Measures a file of several GB: Qwen3.5 with nine billion random weights in Q4_K and Q6_K, and its real vocabulary."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from benchmarks.harness import Report
from benchmarks.ours import N_UNTIMED, Ours, draw
from benchmarks.real.programs import llama_server, our_server, resident_mib
from hybridmem.models import load_model
from hybridmem.models.loading.gguf.header import Header
from tests.models.gguf_files import add_field, described

_RANDOM = np.random.default_rng(0).integers(0, 256, 1 << 22, dtype=np.uint8)
NOTE = (
    "The file of several GB is in the page cache. Ready: until /health answers, with imports; without imports: "
    "`load_model` in a process that has loaded a small model before. Resident: of that process, without what it had "
    "before and without the memory's pages, as a share of the file. Reading once: half of torch's copy of so many "
    "bytes, between the steps."
)


def measure(report: Report, programs: Path, vocabulary: Path, *, quick: bool) -> None:
    """Write the file, and add to the report how long opening and decoding take and how much memory they need.

    Args:
        vocabulary: a GGUF file whose tokenizer the new file gets.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "qwen3.5-9b-random.gguf"
        _write(path, vocabulary, n_layers=4 if quick else 32)
        # Without this, the system would still write the file to the disk while it is read.
        os.sync()
        call = f"print_figures({str(path)!r}, {torch.get_num_threads()})"
        command = [sys.executable, "-c", f"from benchmarks.real.big_file import print_figures; {call}"]
        for _ in range(2):  # The first run compiles kernels.
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        own = json.loads(said.splitlines()[-1])
        n_threads = torch.get_num_threads()
        with our_server(path, n_threads=n_threads) as ours:
            own["ready, s"] = ours.ready_s
        with llama_server(programs, path, slots=1, context=2048, n_threads=n_threads) as theirs:
            figures = {"ready, s": theirs.ready_s, "decode, ms": _their_decode_ms(theirs)}
        report.add(f"a file of {path.stat().st_size / 1e9:.1f} GB", {"by": "ours", **own})
        report.add("the same by llama-server", {"by": "llama-server", **figures})


def print_figures(path: str, n_threads: int) -> None:
    """Load the file, decode, and print the times and bytes as JSON."""
    torch.set_num_threads(n_threads)
    load_model("embedded", progress=False)
    before_mib, started, n_bytes = resident_mib("self"), time.perf_counter(), Path(path).stat().st_size
    model = load_model(path, progress=False)
    found: dict[str, Any] = {"load, s": time.perf_counter() - started}
    subject, seconds = Ours(model, 1, budget="256MiB"), []
    subject.prefill(draw(1, 64))
    source = torch.ones((1 << 29) // 4)
    target, copies = torch.empty_like(source), list[float]()
    for _ in range(N_UNTIMED + 20):
        started = time.perf_counter()
        subject.decode()
        middle = time.perf_counter()
        target.copy_(source)
        seconds.append(middle - started)
        copies.append((time.perf_counter() - middle) / 2 * n_bytes / source.nbytes)
    found["decode, ms"] = 1e3 * statistics.median(seconds[N_UNTIMED:])
    del source, target
    resident = (resident_mib("self") - before_mib) * 2**20 - subject.memory.usage().used_bytes
    found["resident / file"] = resident / n_bytes
    found["reading once, ms"] = 1e3 * statistics.median(copies[N_UNTIMED:])
    found["of reading once"] = found["reading once, ms"] / found["decode, ms"]
    print(json.dumps(found))


def _their_decode_ms(server: Any) -> float:
    reply = server.post("/completion", prompt=[5] * 64, n_predict=16, temperature=0, ignore_eos=True)
    return float(reply["timings"]["predicted_per_token_ms"])


def _write(path: Path, vocabulary: Path, n_layers: int) -> None:
    """Write the file with random blocks, in transformers' shapes, with names and fields from the tests' GGUF writer."""
    fields = Header(vocabulary).fields
    config = Qwen3_5TextConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]), hidden_size=4096, intermediate_size=12_288,
        num_hidden_layers=n_layers, num_attention_heads=16, num_key_value_heads=4, head_dim=256,
        linear_num_value_heads=32, linear_num_key_heads=16,
    )  # fmt: skip
    with torch.device("meta"):
        state = dict(AutoModelForCausalLM.from_config(config).state_dict())
    arch, described_fields, tensors = described(config.to_dict(), state)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    for key, value in described_fields.items():
        add_field(writer, f"{writer.arch}.{key}", value)
    for key in fields:
        if key.startswith("tokenizer."):
            add_field(writer, key, fields[key])
    for name, tensor in tensors.items():
        data, kind = _random(name, tuple(tensor.shape))
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _random(name: str, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]:
    """Return blocks of a type that llama.cpp's Q4_K_M would choose; a matrix has a variance of about 1 / width."""
    is_matrix = len(shape) == 2 and shape[-1] % 256 == 0 and "conv1d" not in name
    if not is_matrix:
        constant = {"norm.weight": 1.0, "ssm_a": -1.0}
        found = next((value for end, value in constant.items() if name.endswith(end)), None)
        values = np.full(shape, found) if found is not None else np.random.default_rng(1).normal(0, 0.1, shape)
        return values.astype(np.float32), gguf.GGMLQuantizationType.F32
    n_rows, width = shape
    has_six = name in ("output.weight", "token_embd.weight") or "ffn_down" in name or "attn_v" in name
    n_bytes, kind = (210, gguf.GGMLQuantizationType.Q6_K) if has_six else (144, gguf.GGMLQuantizationType.Q4_K)
    start = zlib.crc32(name.encode()) % len(_RANDOM)
    blocks = np.resize(np.roll(_RANDOM, start), n_rows * width // 256 * n_bytes).reshape(-1, n_bytes)
    if has_six:  # A number is (q - 32) * scale * d, and q is uniform.
        blocks[:, 192:208] = 32
        blocks[:, 208:] = np.frombuffer(np.float16(width**-0.5 / (18.5 * 32)).tobytes(), np.uint8)
    else:  # A number is q * scale * d - minimum * d_minimum; all scales and minima are 32.
        scales = np.array([1, 7.5]) * width**-0.5 / (4.6 * 32)
        blocks[:, :4] = np.frombuffer(scales.astype(np.float16).tobytes(), np.uint8)
        blocks[:, 4:12], blocks[:, 12:16] = 0xA0, 0
    return blocks.reshape(n_rows, -1), kind
