"""Measures both servers with the same file, one after the other in each round, with one thread each."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from benchmarks.harness import Report
from benchmarks.real.programs import Server, llama_server, our_server, resident_mib
from hybridmem.chat.prompts import load_tokenizer
from hybridmem.memory import HybridMemory
from hybridmem.models import load_model

_LOADS, _PROMPTS = (1, 4, 8), (512, 2048)
_N_TOKENS = 64
_ASKED = {
    "ready, s": "<= 1.5", "resident, MiB": "-", "first token, ms": "<= 1.2",
    "decode 1, tokens/s": ">= 1.0", "decode 4, tokens/s": ">= 1.5", "decode 8, tokens/s": ">= 2.0",
    "prompt 512, tokens/s": ">= 1.2", "prompt 2048, tokens/s": ">= 1.2",
}  # fmt: skip
NOTE = (
    "Servers run with one thread each and are never asked at once. Ready: from the start of the process to /health, "
    "the file in the page cache. First token: a prompt of 24 tokens. Decode: replies of 64 tokens, of 1, 4 and 8 "
    "requests at once. Resident of a second model: with its tokenizer, after use, without libraries, kernels and cache."
)


def compare(report: Report, programs: Path, model: Path, text: str, n_rounds: int) -> None:
    """Add a table of both servers' medians and their ratio, ours to theirs."""
    found: dict[str, dict[str, list[float]]] = {"ours": {}, "llama-server": {}}
    for _ in range(n_rounds):
        for name, start in (("llama-server", llama_server(programs, model)), ("ours", our_server(model))):
            with start as server:
                for figure, value in _measure(server, model.stem, text).items():
                    found[name].setdefault(figure, []).append(value)
    for figure, asked in _ASKED.items():
        ours, theirs = (statistics.median(found[name][figure]) for name in ("ours", "llama-server"))
        row = {"figure": figure, "ours": ours, "llama-server": theirs, "ours / theirs": ours / theirs, "asked": asked}
        report.add(f"servers with {model.name}", row)
    call = [sys.executable, "-c", f"from benchmarks.real.serving import print_resident; print_resident({str(model)!r})"]
    beside = json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout)
    report.add(f"servers with {model.name}", {
        "figure": "resident / file, of a second model in a process", "ours": beside, "llama-server": "-",
        "ours / theirs": "-", "asked": "<= 1.25",
    })  # fmt: skip


def print_resident(path: str) -> None:
    """Print the resident memory that a model adds to a process, as a share of the bytes of its file.

    The process has loaded and used the same model once before, so libraries, kernels and pages of the memory, which
    stay, are not counted.
    """
    torch.set_num_threads(1)
    kept = list[object]()
    resident = list[float]()
    for _ in range(2):
        model, tokenizer = load_model(path, progress=False), load_tokenizer(path)
        memory = HybridMemory(model.memory_spec, "64MiB")
        for n in (512, 1):
            with memory.step({memory.open(): [5] * n}) as step:
                model(step)
        del memory
        gc.collect()
        kept += [model, tokenizer]
        resident.append(resident_mib("self"))
    print((resident[1] - resident[0]) * 2**20 / Path(path).stat().st_size)


def _measure(server: Server, name: str, text: str) -> dict[str, float]:
    def complete(prompt: str, n_tokens: int) -> float:
        started = time.perf_counter()
        server.post(
            "/v1/completions", model=name, prompt=prompt, max_tokens=n_tokens, temperature=0, ignore_eos=True
        )  # fmt: skip
        return time.perf_counter() - started

    complete("Hello there", 8)
    found = {"ready, s": server.ready_s}
    question = "What is the capital of France? Please tell me in one long sentence, with all the details that you know."
    found["first token, ms"] = 1e3 * min(complete(f"{i}. {question}", 1) for i in range(3))
    for n in _LOADS:
        found[f"decode {n}, tokens/s"] = max(_decode(complete, n, turn) for turn in range(2))
    for n in _PROMPTS:
        prompt = _text_of(server, text[n:], n)
        found[f"prompt {n}, tokens/s"] = n / complete(prompt, 1)
    return found | {"resident, MiB": resident_mib(server.pid)}


def _decode(complete, n: int, turn: int) -> float:  # type: ignore[no-untyped-def]
    prompts = [f"Story number {turn}.{n}.{i}: once upon a time" for i in range(n)]
    threads = [threading.Thread(target=complete, args=(prompt, _N_TOKENS)) for prompt in prompts]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return n * _N_TOKENS / (time.perf_counter() - started)


def _text_of(server: Server, text: str, n_tokens: int) -> str:
    """Return the beginning of a text, of about `n_tokens` tokens."""
    ids = server.post("/tokenize", content=text[: 8 * n_tokens])["tokens"]
    return str(server.post("/detokenize", tokens=ids[:n_tokens])["content"])
