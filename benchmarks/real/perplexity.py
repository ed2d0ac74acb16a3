"""Measures perplexity on a book by llama.cpp's rule, for real models with all rows, with policies and in few bits.

llama.cpp cuts a text into windows and scores the second half of each window. Each token is predicted from the tokens
before it in the same window.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import Report
from benchmarks.real.programs import quantised
from benchmarks.sparse import POLICIES
from hybridmem.memory import HybridMemory, MemorySpec
from hybridmem.memory.quantization import Float8, Quantized
from hybridmem.models import LanguageModel, load_model

WINDOW_TOKENS = 512
_LONG_TOKENS, _STEP_TOKENS = 2048, 16
_SHARES = (0.1, 0.25, 0.5)
_STORAGES = (Quantized(8), Float8(), Quantized(4), Quantized(2))
_FINAL = re.compile(r"Final estimate: PPL = ([\d.]+)")
_WEIGHTS = {
    None: (("auto", "float32"), ("auto", "bfloat16")),
    "F16": (("auto", "bfloat16"), ("int8", "bfloat16"), ("int4", "bfloat16")),
    "Q8_0": (("auto", "bfloat16"),),
    "Q4_0": (("auto", "bfloat16"),),
}
"""The type of a file (None: as it came), and how we load it. What has few bits already is not rounded a second time."""

NOTE = (
    f"Perplexity by rows: windows of {_LONG_TOKENS} tokens, of which the first half is a prompt, and the second is "
    f"scored and fed {_STEP_TOKENS} tokens a step; share: the rows of a policy, of {_LONG_TOKENS}. The newest rows are "
    "kept in addition, for rollbacks."
)


def against_llamacpp(report: Report, programs: Path, model: Path, ids: list[int], first: list[int], text: str) -> None:
    """Add perplexities of the same windows: llama.cpp's, and ours for each type of file, weights and dtype.

    Files of other types are written by llama-quantize.
    """
    table = f"perplexity of {model.name}, {len(ids)} tokens in windows of {WINDOW_TOKENS}"
    for kind, loaded_as in _WEIGHTS.items():
        with nullcontext(model) if kind is None else quantised(programs, model, kind) as path:
            theirs = _theirs(programs, path, text, len(ids) // WINDOW_TOKENS)
            row = {"file": kind or "as it came", "by": "llama.cpp", "weights": "as stored", "dtype": "-"}
            report.add(table, row | {"perplexity": theirs, "ours / theirs": "-"})
            for weights, dtype in loaded_as:
                loaded = load_model(path, weights=weights, dtype=dtype, progress=False)  # type: ignore[arg-type]
                ours = perplexity(loaded, ids, first)
                row |= {"by": "ours", "weights": weights, "dtype": dtype}
                report.add(table, row | {"perplexity": ours, "ours / theirs": ours / theirs})


def by_rows(report: Report, path: Path, ids: list[int], first: list[int]) -> None:
    """Add perplexities under each policy and storage, when text is fed a few tokens in each step, as replies are."""
    model = load_model(path, progress=False)
    spec, table = model.memory_spec, f"perplexity of {path.name} by the rows that attention keeps"
    every = _long_perplexity(model, spec, ids, first)
    report.add(table, {"rows": "all", "share": 1.0, "perplexity": every, "ratio": 1.0})
    for storage in _STORAGES:
        found = _long_perplexity(model, spec.with_storage(storage), ids, first)
        report.add(table, {"rows": repr(storage), "share": 1.0, "perplexity": found, "ratio": found / every})
    for policy in POLICIES:
        for share in _SHARES:
            own = policy(round(share * _LONG_TOKENS))
            found = _long_perplexity(model, spec.with_policy(own), ids, first)
            report.add(table, {"rows": policy.__name__, "share": share, "perplexity": found, "ratio": found / every})


def _theirs(programs: Path, model: Path, text: str, n_windows: int) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        command = [str(programs / "llama-perplexity"), "-m", str(model), "-f", file.name, "-c", str(WINDOW_TOKENS)]
        command += ["--chunks", str(n_windows), "-t", "1"]
        said = subprocess.run(command, capture_output=True, text=True)
    found = _FINAL.search(said.stdout + said.stderr)
    if found is None:
        raise RuntimeError(f"llama-perplexity ended with {said.returncode}: {said.stderr[-1000:]}")
    return float(found[1])


def _windows(ids: list[int], first: list[int], n_tokens: int) -> Iterator[list[int]]:
    """Cut a text into windows; each begins with the token that begins texts, if the model has one."""
    text = first + ids
    for start in range(0, max(1, len(text) - n_tokens + 1), n_tokens):
        window = text[start : start + n_tokens]
        yield first + window[len(first) :]


def perplexity(model: LanguageModel, ids: list[int], first: list[int]) -> float:
    memory, losses = HybridMemory(model.memory_spec, "256MiB"), list[Tensor]()
    for window in _windows(ids, first, WINDOW_TOKENS):
        sequence = memory.open()
        with memory.step({sequence: window}, outputs="all") as step:
            logits = model(step)
        half = WINDOW_TOKENS // 2
        losses.append(_losses(logits[half:-1], window[half + 1 :]))
        memory.close(sequence)
    return math.exp(float(torch.cat(losses).mean()))


def _long_perplexity(model: LanguageModel, spec: MemorySpec, ids: list[int], first: list[int]) -> float:
    memory, losses, half = HybridMemory(spec, "512MiB"), list[Tensor](), _LONG_TOKENS // 2
    for window in _windows(ids, first, _LONG_TOKENS):
        sequence = memory.open()
        memory.run(model, {sequence: window[:half]})
        for at in range(half, len(window) - 1, _STEP_TOKENS):
            fed = window[at : min(at + _STEP_TOKENS, len(window) - 1)]
            with memory.step({sequence: fed}, outputs="all") as step:
                losses.append(_losses(model(step), window[at + 1 : at + 1 + len(fed)]))
        memory.close(sequence)
    return math.exp(float(torch.cat(losses).mean()))


def _losses(logits: Tensor, targets: Sequence[int]) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), torch.tensor(targets), reduction="none")
