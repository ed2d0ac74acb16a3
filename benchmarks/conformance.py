"""Writes a table of the promises of `memory.testing` that other libraries' memories keep, on small random models."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module, metadata
from pathlib import Path

import torch

from hybridmem.memory.testing import PROMISES, Adapter, HybridAdapter, Result, check
from hybridmem.memory.testing.subjects import attention, hybrid

PAGE = Path(__file__).parent.parent / "docs" / "results" / "peers-conformance.md"
PEERS = {
    "transformers": "benchmarks.peers.transformers_cache",
    "llama_cpp": "benchmarks.peers.llamacpp_context",
    "mlx_lm": "benchmarks.peers.mlx_lm_cache",
}
"""Package -> the module with its subjects."""
_PACKAGES = {"transformers": "transformers", "llama_cpp": "llama-cpp-python", "mlx_lm": "mlx-lm"}
_MARKS = {"passed": "passed", "failed": "**failed**", "refused": "refused"}


def make_ours() -> Mapping[str, Callable[[], Adapter]]:
    """Return this library's own subjects: tiny models, and the hybrid model on which the other libraries are tested."""
    from hybridmem.models.loading.load import from_transformers
    from tests.models.hf_models import hf_model

    jamba = from_transformers(hf_model("jamba"))
    return {"attention": attention, "hybrid": hybrid, "jamba": lambda: HybridAdapter(jamba)}


def results_of(module: str, name: str, n_examples: int, promise: str | None = None) -> list[Result]:
    """Return the results of one subject of a peer; each has a process of its own."""
    torch.set_num_threads(1)
    factory = import_module(module).SUBJECTS[name]
    return list(check(factory, PROMISES if promise is None else [promise], n_examples=n_examples))


def conformance(n_examples: int) -> dict[str, dict[str, list[Result] | str]]:
    """Return each subject's results by library and subject, or a text that says why there are none."""
    torch.set_num_threads(1)
    ours: dict[str, list[Result] | str] = {
        name: list(check(factory, n_examples=n_examples)) for name, factory in make_ours().items()
    }
    found: dict[str, dict[str, list[Result] | str]] = {"hybrid-memory": ours}
    for package, module in PEERS.items():
        if importlib.util.find_spec(package) is None:
            continue
        found[f"{_PACKAGES[package]} {metadata.version(_PACKAGES[package])}"] = {
            name: _in_a_process(module, name, n_examples) for name in import_module(module).SUBJECTS
        }
    return found


def _in_a_process(module: str, name: str, n_examples: int) -> list[Result] | str:
    """Test a peer in a process of its own, and return the results, or a text if the peer crashed the process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(results_of, module, name, n_examples).result()
        except BrokenProcessPool:
            return "its process ended before it had a result"


def write_page(found: dict[str, dict[str, list[Result] | str]], page: Path) -> None:
    """Write the tables of results, and the list of the faults that were found, into the page."""
    parts = [_HEAD]
    for library, subjects in found.items():
        whole = {name: results for name, results in subjects.items() if isinstance(results, list)}
        parts.append(f"\n## {library}\n")
        parts.append(f"| promise | {' | '.join(whole)} |\n|---|{'---|' * len(whole)}")
        for i, promise in enumerate(PROMISES):
            parts.append(f"| {promise} | {' | '.join(_MARKS[results[i].verdict] for results in whole.values())} |")
        parts.append("")
        for name, results in subjects.items():
            if isinstance(results, str):
                parts.append(f"- {name}: {results}")
        parts += [_line(name, r) for name, results in whole.items() for r in results if r.verdict == "failed"]
        parts.append("")
    tested = [results for subjects in found.values() for results in subjects.values() if isinstance(results, list)]
    n_operations = sum(result.n_operations for results in tested for result in results)
    parts.append(f"In all {n_operations:,} operations.")
    page.write_text("\n".join(parts) + "\n")


def _line(name: str, result: Result) -> str:
    why = result.why.split("\n")[0]
    return f"- {name} breaks *{result.promise.name}*: {why[:160]} (seed {result.seed})."


_HEAD = """# Conformance of peers

This page says which promises of [`memory.testing`](../how-to/testing-a-memory.md) the memories of other libraries keep,
on small random models. `python -m benchmarks conformance` writes it. The promises are those of this library; other
libraries do not promise all of them. A promise is *refused* if it needs a call that the library does not have, or if
the library refused any part of it and changed nothing. Rollbacks by more than 8 tokens may be refused freely. A promise
*failed* if the library broke it without an error, or raised another error; the command prints the smallest history that
shows it. Below each table, every line names a model, the promise that it breaks, and the first fault that was found.

The adapters are in `benchmarks/peers/`:

- In transformers, each sequence has a `DynamicCache` of its own. `crop` goes back, and a fork copies the cache. "Past
  recorded" calls `activate_past_recording` first. "Forks by rows" doubles the rows of a copy
  (`batch_repeat_interleave`) and selects one (`batch_select_indices`). Where `crop` is wrong, the cache's
  `is_croppable` is False, but no call of transformers checks it.
- In llama.cpp, sequences share a context. `llama_memory_seq_rm` goes back, and `llama_memory_seq_cp` forks. "Back by a
  partial copy" goes back by copying the part that stays.
- In mlx-lm, on its CPU build, each sequence has a list of caches. `trim_prompt_cache` goes back, and a fork copies the
  list. "In batches" merges the lists of a step, pads the tokens on the right and extracts the lists again, as
  `BatchGenerator` does with prompts.
"""
