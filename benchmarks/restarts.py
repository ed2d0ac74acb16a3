"""Measures how much time is saved by keeping prefixes outside of the budget: after a restart, and for each tier."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness import Report
from benchmarks.ours import draw
from benchmarks.workloads import CONFIGS, save_random
from hybridmem.chat.engine.engine import Engine
from hybridmem.memory import HybridMemory
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import LanguageModel, load_model

_PEER = (
    "Peers, measured elsewhere: llama.cpp restores a slot of a hybrid model in 0.12 s from its file and then computes "
    "the prompt again, 75.9 s (llama.cpp#25913); a chat goes on after 23 s without its checkpoints and after 75 ms "
    "with them (llama.cpp#20819)."
)
_MODELS = ("jamba", "mamba2")
_SHARED, _UNIQUE = 1600, 600
"""Tokens of a prompt in the workload of vllm#45238 that all prompts begin with, and its own."""


def restarts(*, quick: bool, models: Seq[str] = _MODELS) -> Report:
    """Measure first-token times: of a chat's next turn after a restart, and of prompts by their checkpoint's tier."""
    report = Report("restarts")
    report.notes.append(_PEER)
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            save_random(CONFIGS[name](), folder)
            model = load_model(folder, dtype="bfloat16", progress=False)
        _restart(report, name, model, n_tokens=1024 if quick else 26_000, n_rounds=1 if quick else 3)
        _tiers(report, name, model, n_prompts=6 if quick else 12)
    _reuse(report, n_prompts=8 if quick else 64)
    return report


def _restart(report: Report, name: str, model: LanguageModel, *, n_tokens: int, n_rounds: int) -> None:
    """Measure the next turn of a chat of `n_tokens` tokens: at once, after a restart, and without any checkpoint."""
    chat = draw(1, n_tokens)[0].tolist()
    turns = iter(draw(3 * n_rounds, 30).tolist())
    with tempfile.TemporaryDirectory() as folder:
        engine, _ = _engine(model)
        _first_token_s(engine, chat[:600])  # This call compiles the kernels that are still missing.
        assert engine.prefixes is not None
        engine.prefixes.clear()
        again_s = _first_token_s(engine, chat)
        stays = [_first_token_s(engine, chat + next(turns)) for _ in range(n_rounds)]
        started, lock = time.perf_counter(), _Stopwatch()
        n_bytes = engine.prefixes.save(folder, lock)
        save_s = time.perf_counter() - started
        engine.memory.close_all()
        loads, comes_back, reads = list[float](), list[float](), list[float]()
        for _ in range(n_rounds):
            started = time.perf_counter()
            read_bytes = sum(len(path.read_bytes()) for path in Path(folder).glob("blocks-*"))
            reads.append(time.perf_counter() - started)
            engine, load_s = _engine(model, folder)
            loads.append(load_s)
            comes_back.append(_first_token_s(engine, chat + next(turns)))
            assert engine.stats.n_reused >= n_tokens - 1
            engine.memory.close_all()
    report.add("next turn of a chat, s to its first token", {
        "model": name, "tokens": n_tokens, "computed again": again_s, "no restart": median(stays),
        "after a restart": median(comes_back), "allowed": 1.1 * median(stays) + median(reads),
        "reading all blocks": median(reads), "MiB": read_bytes / 2**20,
    })  # fmt: skip
    report.add("saving and loading a cache, s", {
        "model": name, "tokens": n_tokens, "save": save_s, "of it the engine waits": sum(lock.held),
        "at once": max(lock.held), "load": median(loads), "MiB of blocks": n_bytes / 2**20,
    })  # fmt: skip


class _Stopwatch:
    """Replaces the lock of an engine, and measures how long the lock is held."""

    def __init__(self) -> None:
        self.held: list[float] = []
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.held.append(time.perf_counter() - self._started)


def _engine(model: LanguageModel, folder: str | None = None) -> tuple[Engine, float]:
    """Return a warm engine, with the prefixes of a folder if one is given, and the seconds that loading them took."""
    memory = HybridMemory(model.memory_spec, "3GiB")
    engine = Engine(model, memory, None, stop_ids=(), prefixes=PrefixCache(memory, grid_tokens=2048), step_tokens=512)
    engine.submit([0], max_tokens=1)
    engine.run()
    assert engine.prefixes is not None
    engine.prefixes.clear()
    engine.stats.n_reused = 0
    started = time.perf_counter()
    if folder is not None:
        engine.prefixes.load(folder)
    return engine, time.perf_counter() - started


def _first_token_s(engine: Engine, prompt: list[int]) -> float:
    started = time.perf_counter()
    engine.submit(prompt, max_tokens=1)
    engine.run()
    return time.perf_counter() - started


def _tiers(report: Report, name: str, model: LanguageModel, *, n_prompts: int) -> None:
    """Measure prompts whose checkpoint is in the budget, in host memory, in a file, or nowhere."""
    stem = draw(1, _SHARED)[0].tolist()
    prompts = [stem + own for own in draw(n_prompts, _UNIQUE).tolist()]
    seconds: dict[str, list[float]] = {"computed again": [], "budget": [], "host": [], "disk": []}
    n_bytes = 0.0
    for tier in seconds:
        with tempfile.TemporaryDirectory() as folder:
            options = {"host_budget": 1, "swap_dir": folder} if tier == "disk" else {}
            memory = HybridMemory(model.memory_spec, "2GiB", **options)  # type: ignore[arg-type]
            cache = PrefixCache(memory, grid_tokens=0, max_bytes="4GiB")
            for prompt in prompts:
                sequence, lookup = cache.open(prompt)
                memory.run(model, {sequence: prompt[lookup.reused :]})
                cache.insert(sequence)
                memory.close(sequence)
            while tier in ("host", "disk") and cache.reclaim(memory.budget):
                pass
            n_bytes = sum(memory.counters.swapped_bytes) / n_prompts or n_bytes
            for prompt in prompts:
                if tier == "computed again":
                    cache.clear()
                asked = [*prompt, 1]
                started = time.perf_counter()
                sequence, lookup = cache.open(asked)
                memory.run(model, {sequence: asked[lookup.reused :]})
                seconds[tier].append(time.perf_counter() - started)
                assert lookup.tier == ("" if tier == "computed again" else tier), lookup
                memory.close(sequence)
            memory.close_all()
    report.add(f"a prompt of {_SHARED + _UNIQUE:,} tokens by the tier of its checkpoint, ms to its first token", {
        "model": name, **{tier: median(samples) * 1e3 for tier, samples in seconds.items()},
        "MiB a checkpoint": n_bytes / 2**20,
    })  # fmt: skip


def _reuse(report: Report, *, n_prompts: int) -> None:
    """Measure the share of reused tokens if the budget holds a tenth of the workload's prompts and next turns."""
    model = load_model("embedded", progress=False)
    generator = torch.Generator().manual_seed(0)

    def drawn(n: int) -> list[int]:
        return torch.randint(0, model.memory_spec.vocab_size, (n,), generator=generator).tolist()

    stem = drawn(_SHARED)
    prompts = [stem + drawn(_UNIQUE) for _ in range(n_prompts)]
    turns = prompts + [prompt + drawn(20) for prompt in prompts]

    def reused(budget: int | str, max_bytes: int | str = 0, **options: object) -> tuple[float, int]:
        memory = HybridMemory(model.memory_spec, budget, **options)  # type: ignore[arg-type]
        cache = PrefixCache(memory, grid_tokens=512, max_bytes=max_bytes)
        for prompt in turns:
            sequence, lookup = cache.open(prompt)
            at = lookup.reused
            for cut in [*cache.cuts(prompt, at), len(prompt)]:
                memory.run(model, {sequence: prompt[at:cut]})
                cache.insert(sequence)
                at = cut
            memory.close(sequence)
        most_bytes, share = memory.counters.used_bytes, cache.stats().hit_rate
        memory.close_all()
        return share, most_bytes

    ideal, n_bytes = reused("4GiB")
    tenth = max(n_bytes // 10, 4 << 20)
    with tempfile.TemporaryDirectory() as folder:
        report.add("share of tokens reused, workload of vllm#45238 and a next turn of each prompt", {
            "prompts": n_prompts, "MiB of all": n_bytes / 2**20, "unbounded": ideal, "a tenth": reused(tenth)[0],
            "a tenth, and host memory": reused(tenth, "4GiB")[0],
            "a tenth, a tenth of host memory, and files":
                reused(tenth, "4GiB", host_budget=tenth, swap_dir=folder)[0],
            "asked": ideal - 0.02,
        })  # fmt: skip
