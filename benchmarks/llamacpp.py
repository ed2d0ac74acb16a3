"""Measures decode and prefill beside llama.cpp, on GGUF files with the same random weights, in 32, 16, 8 and 4 bits."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Report, Samples
from benchmarks.llamacpp_peer import MOST_AT_ONCE, LlamaProcess, start_llamacpp, time_calls
from benchmarks.ours import Ours, draw, workload
from benchmarks.workloads import CONFIGS, save_random
from hybridmem.models import LanguageModel, load_model
from hybridmem.models.loading.load import weight_bytes

MODELS = ("jamba", "mamba", "mamba2")
"""Models of the other benchmarks that llama.cpp has, and whose layers it computes by the same rules."""

_STEPS = 10
"""Decode steps of a turn; one more before them wakes the threads, and is not timed."""

_PAUSE_S = 0.05
"""Seconds before each turn: threads go on spinning for some milliseconds, and would slow the other side down."""

TOLERANCE = 0.01
"""Largest difference of a logit in F32, as a share of the logits' standard deviation.

In float32 these models differ from themselves in float64 by .002: 24 layers of random weights amplify what is rounded.
"""

_ASKED = {1: 0.95, 8: 1.5, 32: 2.5}
"""Ratios that this project wants at least for decode, by sequences."""

_ASKED_OF_PREFILL = 1.2

Turn = Callable[[int, int], list[float]]
"""Makes calls that are not timed, then calls that are, and returns the seconds of these."""


@dataclass(frozen=True)
class Format:
    """Says in which format this library and llama.cpp keep the weights of a file.

    Attributes:
        options: the arguments of `load_model` in addition to the file.
        keys: llama.cpp's type of keys and values: F32 for weights in F32, otherwise F16, which is llama.cpp's default.
    """

    options: Mapping[str, str]
    keys: str

    @property
    def call(self) -> str:
        return f"load_model(file{''.join(f', {name}={value!r}' for name, value in self.options.items())})"


FORMATS = {
    "F32": Format({}, "F32"),
    "BF16": Format({}, "F16"),
    "Q8_0": Format({"weights": "int8"}, "F16"),
    "Q4_0": Format({"weights": "int4"}, "F16"),
}
"""Types of a file's matrices."""


class Peer(Protocol):
    """Feeds prompts, and then the tokens with the largest logits; returns the last logits of each sequence."""

    def prefill(self, tokens: np.ndarray) -> np.ndarray: ...

    def decode(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Agreement:
    """Says how far the logits of two models are apart, as shares of the standard deviation of the logits.

    Attributes:
        largest, typical: the largest difference, and the standard deviation of all differences.
        same: the share of positions at which both models give the same token the largest logit.
    """

    largest: float
    typical: float
    same: float


def llamacpp(*, quick: bool, models: Sequence[str] = MODELS) -> Report:
    """Measure this library and llama.cpp in turns on each file, after both gave the same logits on the F32 file."""
    report = Report("llamacpp")
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            save_random(CONFIGS[name](), folder)
            for kind in FORMATS:
                path = write_model(Path(folder), kind)
                model = load_in(path, kind)
                _check(report, name, kind, model, path)
                for n_sequences, n_tokens in workload(quick=False)[: 2 if quick else None]:
                    _measure(report, name, kind, model, path, n_sequences, n_tokens, quick=quick)
                path.unlink()
    _add_notes(report)
    return report


def write_model(folder: Path, kind: str) -> Path:
    """Write the checkpoint of a folder to a GGUF file beside it, with matrices of one type."""
    # The tests of the loader have a writer that makes the same changes as llama.cpp's converter.
    from tests.models.gguf_files import write_gguf

    return write_gguf(folder, folder / f"{kind}.gguf", kind)


def load_in(path: Path, kind: str) -> LanguageModel:
    return load_model(path, progress=False, **FORMATS[kind].options)  # type: ignore[arg-type]


def agree(model: LanguageModel, peer: Peer, tokens: Tensor, n_steps: int) -> Agreement:
    """Feed both models the prompts, then the tokens that the peer chooses, and compare the logits after each step."""
    ours = Ours(model, len(tokens), budget="256MiB")
    found, expected = [_logits(ours, tokens.tolist())], [peer.prefill(tokens.numpy())]
    for _ in range(n_steps):
        found.append(_logits(ours, expected[-1].argmax(-1)[:, None].tolist()))
        expected.append(peer.decode())
    left, right = np.concatenate(found), np.concatenate(expected)
    error = np.abs(left - right) / right.std()
    return Agreement(
        float(error.max()), float((error**2).mean() ** 0.5), float((left.argmax(-1) == right.argmax(-1)).mean())
    )


def differ_in_batch(peer: Peer, tokens: Tensor) -> float:
    """Return how far a peer's logits for prompts in one batch are from those for single prompts, as a share."""
    together = peer.prefill(tokens.numpy())
    alone = np.concatenate([peer.prefill(tokens[i : i + 1].numpy()) for i in range(len(tokens))])
    return float(np.abs(together - alone).max() / alone.std())


def _logits(ours: Ours, tokens: list[list[int]]) -> np.ndarray:
    with ours.memory.step(zip(ours.sequences, tokens, strict=True)) as step:
        logits = ours.model(step)
    return logits.float().numpy()


def require_same(found: Agreement, name: str) -> None:
    """Raise RuntimeError if logits in 32 bits differ: the speeds of different models are not worth comparing."""
    if not found.largest <= TOLERANCE:
        raise RuntimeError(
            f"{name}: logits of ours and of llama.cpp differ by {found.largest:.2g} of their spread in F32, more than "
            f"{TOLERANCE}, and {found.same:.0%} of the tokens are the same; these are different models, so no speed is "
            "measured"
        )


def require_whole_batch(difference: float, name: str) -> None:
    """Raise RuntimeError if llama.cpp's logits for several sequences differ from those for each sequence alone."""
    if not difference <= TOLERANCE:
        raise RuntimeError(
            f"{name}: llama.cpp's logits of prompts in one batch and alone differ by {difference:.2g} of their spread, "
            f"more than {TOLERANCE}, so no speed is measured. Its products for AMX do that to recurrent layers: "
            'compile it without them, CFLAGS=-U__AMX_INT8__ CXXFLAGS=-U__AMX_INT8__ CMAKE_ARGS="-DGGML_NATIVE=ON"'
        )


def in_turns(turns: Mapping[str, Turn], n_rounds: int, n_steps: int, *, n_untimed: int) -> dict[str, Samples]:
    """Time `n_steps` calls of each library in each round, one library after the other."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(n_rounds):
        for name, turn in turns.items():
            time.sleep(_PAUSE_S)
            seconds[name] += turn(n_untimed, n_steps)
    return {name: Samples(samples) for name, samples in seconds.items()}


def _check(report: Report, name: str, kind: str, model: LanguageModel, path: Path) -> None:
    """Compare logits of 3 sequences over 64 tokens and 16 steps; report the differences and the bytes of weights."""
    options = {"keys": FORMATS[kind].keys, "n_threads": torch.get_num_threads()}
    with start_llamacpp(path, 3, 128, **options) as theirs:
        tokens = draw(3, 64)
        require_whole_batch(differ_in_batch(theirs, tokens), f"{name}, {kind}")
        found = agree(model, theirs, tokens, 16)
        if not report.notes:
            report.notes.append(theirs.describe())
    if kind == "F32":
        require_same(found, name)
    report.add("agreement and bytes", {
        "model": name, "matrices": kind, "ours": FORMATS[kind].call, "in": str(model.memory_spec.dtype)[6:],
        "llama.cpp, keys and values in": FORMATS[kind].keys, "largest difference": found.largest,
        "typical": found.typical, "same tokens, %": 100 * found.same, "bytes of the file": path.stat().st_size,
        "of our weights": weight_bytes(model),
    })  # fmt: skip


def _measure(
    report: Report, name: str, kind: str, model: LanguageModel, path: Path, n_sequences: int, n_tokens: int, *,
    quick: bool,
) -> None:  # fmt: skip
    tokens, work = draw(n_sequences, n_tokens), f"{n_sequences} x {n_tokens}"
    n_context = n_tokens + 256
    options = {"keys": FORMATS[kind].keys, "n_threads": torch.get_num_threads()}
    ours = Ours(model, n_sequences)
    with start_llamacpp(path, n_sequences, n_context, **options) as theirs:
        prefills = _turns(theirs, "prefill", lambda: ours.prefill(tokens), tokens.numpy())
        in_turns(prefills, 1, 1, n_untimed=0)
        times = in_turns(prefills, 1 if quick else 5, 1, n_untimed=0)
        _add(report, "prefill, ms", name, kind, work, times, _ASKED_OF_PREFILL)
        decodes = _turns(theirs, "decode", ours.decode)
        times = in_turns(decodes, 2 if quick else 8, _STEPS, n_untimed=1)
        _add(report, "decode, ms a step", name, kind, f"{n_sequences} after {n_tokens}", times, _ASKED[n_sequences])


def _turns(theirs: LlamaProcess, name: str, call: Callable[[], object], *arguments: object) -> dict[str, Turn]:
    return {
        "ours": lambda n_untimed, n_timed: time_calls(call, n_untimed, n_timed),
        "llama.cpp": lambda n_untimed, n_timed: theirs.time(name, n_untimed, n_timed, *arguments),
    }


def _add(
    report: Report, table: str, name: str, kind: str, work: str, times: Mapping[str, Samples], asked: float
) -> None:
    ours, theirs = times["ours"], times["llama.cpp"]
    report.add(table, {
        "model": name, "matrices": kind, "sequences": work, "ours": ours.median_ms, "spread": ours.spread,
        "llama.cpp": theirs.median_ms, "its spread": theirs.spread,
        "llama.cpp / ours": theirs.median_ms / ours.median_ms, "asked": asked,
    })  # fmt: skip


def _add_notes(report: Report) -> None:
    report.notes += [
        f"llama.cpp / ours above 1: ours is faster. Both have {torch.get_num_threads()} threads, and processes of "
        f"their own, of which one sleeps while the other computes. Turns of {_STEPS} steps, or of one prompt, "
        "alternate.",
        "Files hold all matrices in one type; those whose rows are not whole blocks of 32 are F16, and norms, "
        "convolutions and decays F32. So a Q4_0 file holds its embedding, which is also its head, in 4 bits, where "
        "llama-quantize would take Q6_K: the gguf package cannot write K-quants, and ours has 4 bits there, too.",
        "Ours rounds int8 and int4 again from the file's numbers, computes in bfloat16, and keeps a rollback window of "
        f"32 tokens. llama.cpp has one context for all sequences, a batch of all their tokens, {MOST_AT_ONCE} at once.",
        "Differences of logits are shares of their standard deviation, after 64 tokens and 16 steps of 3 sequences. "
        "Random weights amplify what is rounded: Mamba in transformers in bfloat16 differs from itself in float32 by "
        "4.7 at most, .64 typically, so only those in F32 say that both sides run the same model.",
    ]  # fmt: skip
