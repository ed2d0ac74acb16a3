"""Measures what reusing prefixes and swapping sequences costs, and what share of a workload's tokens is reused."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch

from benchmarks.books import make_memory
from benchmarks.harness import Report
from benchmarks.ours import Ours, draw
from benchmarks.workloads import both_models
from hybridmem.memory import HybridMemory, Sequence
from hybridmem.memory.prefix.cache import PrefixCache

_PEERS = (
    "Peers, measured elsewhere on two cores, not in this run: a lookup and an insert in SGLang's radix tree with "
    "states take 16 and 247 µs in Rust, 65 and 343 in Python; on the workload of vllm#45238 vLLM 0.33 reuses .698, "
    ".465 and .000 of the tokens, SGLang .705, .648 and .789."
)
_N_REQUESTS = 64


def prefixes(*, quick: bool) -> Report:
    """Measure lookups and inserts, the share of tokens reused on a known workload, and swaps.

    Lookups and inserts are in microseconds, swaps in milliseconds.
    """
    report = Report("prefixes")
    report.notes.append(_PEERS)
    _tree(report, n_repeats=200 if quick else 2000)
    for shared, unique in ((1600, 600), (1500, 700), (450, 100)):
        _replay(report, shared, unique)
    for n_tokens in (512,) if quick else (1024, 4096, 16384):
        _swap(report, n_tokens=n_tokens, n_rounds=5 if quick else 40)
    return report


def _tree(report: Report, *, n_repeats: int) -> None:
    """Measure a radix tree of 64 sequences of 2,048 tokens, of which each shares half with others.

    The memory is dry, so that nothing but bookkeeping is timed.
    """
    rng, memory = np.random.default_rng(0), make_memory(12)
    stems = rng.integers(0, 32000, (8, 1024))
    keys = [np.concatenate([stems[i % 8], rng.integers(0, 32000, 1024)]) for i in range(_N_REQUESTS)]
    cache = PrefixCache(memory, grid_tokens=0)
    for key in keys:
        _prefill(cache, key)
    fresh = [np.concatenate([stems[i % 8], rng.integers(0, 32000, 1024)]) for i in range(n_repeats)]
    lookups, inserts = [], []
    for key in fresh:
        started = time.perf_counter_ns()
        found = cache.find(key)
        lookups.append((time.perf_counter_ns() - started) / 1000)
        assert found.by_attention == 1024
    for key in fresh[: n_repeats // 4]:
        sequence, lookup = cache.open(key)
        memory.run(None, {sequence: key[lookup.reused :]}, max_tokens=4096)
        started = time.perf_counter_ns()
        cache.insert(sequence)
        inserts.append((time.perf_counter_ns() - started) / 1000)
        memory.close(sequence)
    whole = [key[:-1] for key in keys]
    same = []
    for i in range(n_repeats):
        started = time.perf_counter_ns()
        cache.find(whole[i % _N_REQUESTS])
        same.append((time.perf_counter_ns() - started) / 1000)
    for what, samples, asked in (
        ("lookup, half of it known", lookups, 20.0),
        ("lookup, all of it known", same, 20.0),
        ("insert, checkpoint included", inserts, 100.0),
    ):
        report.add(
            "a key of 2,048 tokens in a tree of 64 sequences, µs",
            {"what": what, "median": median(samples), "asked": asked},
        )


def _prefill(cache: PrefixCache, key: np.ndarray, marks: tuple[int, ...] = ()) -> int:
    """Prefill a prompt as an engine does, and return the number of tokens reused.

    Checkpoints are inserted at its end and where the cache asks for them.
    """
    sequence, lookup = cache.open(key)
    at = lookup.reused
    for end in [*cache.cuts(key, at, marks), len(key)]:
        cache.memory.run(None, {sequence: key[at:end]}, max_tokens=4096)
        cache.insert(sequence)
        at = end
    cache.memory.close(sequence)
    return lookup.reused


def _replay(report: Report, shared: int, unique: int) -> None:
    """Measure the workload of vllm#45238: 64 prompts with a common beginning, one after the other."""
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 32000, shared)
    prompts = [np.concatenate([stem, rng.integers(0, 32000, unique)]) for _ in range(_N_REQUESTS)]
    total = _N_REQUESTS * (shared + unique)
    row: dict[str, str | int | float] = {"shared": shared, "unique": unique}
    for name, grid, marks in (("no hints", 512, ()), ("no hints, no grid", 0, ()), ("a mark", 0, (shared,))):
        cache = PrefixCache(make_memory(12), grid_tokens=grid)
        row[name] = sum(_prefill(cache, prompt, marks) for prompt in prompts) / total
    report.add(
        "share of tokens reused",
        row | {"asked": (_N_REQUESTS - 2) * shared / total, "ideal": (_N_REQUESTS - 1) * shared / total},
    )


def _swap(report: Report, *, n_tokens: int, n_rounds: int) -> None:
    """Measure swapping a sequence out and in, compared with two copies of as many bytes by torch in the same rounds."""
    with both_models("jamba") as (model, _):
        ours = Ours(model, 1, budget="1GiB")
        ours.fill(draw(1, n_tokens))
        memory, sequence = ours.memory, ours.sequences[0]
        n_bytes = sum(memory.usage().by_sequence[sequence.id].by_kind.values())
        source = torch.randint(0, 255, (n_bytes,), dtype=torch.uint8)
        target = torch.empty_like(source)
        swaps, copies = [], []
        for _ in range(n_rounds + 2):
            swaps.append(_swap_ms(memory, sequence))
            started = time.perf_counter_ns()
            # Allocating is part of the measured copy, because a swap allocates as well.
            copy = torch.empty_like(source)
            copy.copy_(source)
            target.copy_(copy)
            del copy
            copies.append((time.perf_counter_ns() - started) / 1e6)
        swap_ms, copy_ms = median(swaps[2:]), median(copies[2:])
        report.add("swap out and in, ms", {
            "model": "jamba", "tokens": n_tokens, "MiB": n_bytes / 2**20, "swap": swap_ms, "two copies": copy_ms,
            "swap / copies": swap_ms / copy_ms, "asked": 1.2,
        })  # fmt: skip


def _swap_ms(memory: HybridMemory, sequence: Sequence) -> float:
    started = time.perf_counter_ns()
    memory.swap_out(sequence)
    memory.swap_in(sequence)
    return (time.perf_counter_ns() - started) / 1e6
