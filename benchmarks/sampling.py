"""Measures an engine's decode steps by how tokens are chosen: greedily, by sampling, with penalties or by a grammar."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Report
from benchmarks.schemas import Parts
from hybridmem.chat.engine.engine import Engine, Sampling
from hybridmem.chat.engine.output import Output
from hybridmem.memory import HybridMemory

_N_STEPS = 60


def _ways(parts: Parts) -> dict[str, Callable[[int], tuple[Sampling, Output]]]:
    """Return the ways of choosing tokens by name, each as a function of a request's number. No reply ends by itself."""
    endless = Output(stop_ids=())
    penalties: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {5: 1.0}}
    letters = Output(stop_ids=(), grammar=parts.grammars.regex("[a-z ]{2000}"))
    return {
        "greedy": lambda n: (Sampling(), endless),
        "temperature": lambda n: (Sampling(0.8, seed=n), endless),
        "top_k, top_p, min_p": lambda n: (Sampling(0.8, 40, 0.95, seed=n, min_p=0.02), endless),
        "penalties and bias": lambda n: (
            Sampling(0.8, None, None, 1.1, n, **penalties), endless,
        ),
        "5 log probabilities": lambda n: (Sampling(0.8, seed=n), Output(stop_ids=(), logprobs=5)),
        "a grammar": lambda n: (Sampling(0.8, seed=n), letters),
        "all of these": lambda n: (
            Sampling(0.8, 40, 0.95, 1.1, n, min_p=0.02, **penalties),
            Output(stop_ids=(), logprobs=5, grammar=letters.grammar),
        ),
    }  # fmt: skip


def sampling(*, quick: bool) -> Report:
    """Measure median decode steps of 1, 8 and 32 requests; each round runs all ways one after the other."""
    report, parts = Report("sampling"), Parts.load()
    ways = _ways(parts)
    for n_requests in (1, 8, 32):
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(2 if quick else 4):
            for name, way in ways.items():
                seconds[name] += _steps(parts, way, n_requests)
        medians = {name: statistics.median(samples) * 1e3 for name, samples in seconds.items()}
        for name, ms in medians.items():
            row = {"requests": n_requests, "chosen": name, "step, ms": ms, "greedy = 1": ms / medians["greedy"]}
            report.add("decode steps of the embedded model", row)
    report.notes.append(
        "The embedded model has 1.2 million parameters and a vocabulary of 932: the model's part of a step is as small "
        "as it gets."
    )
    return report


def _steps(parts: Parts, way: Callable[[int], tuple[Sampling, Output]], n_requests: int) -> list[float]:
    engine = Engine(parts.model, HybridMemory(parts.model.memory_spec, "256MiB"), parts.tokenizer, max_running=64)
    rng = random.Random(0)
    for n in range(n_requests):
        chosen, output = way(n)
        prompt = [rng.randrange(5, 900) for _ in range(20)]
        engine.submit(prompt, max_tokens=_N_STEPS + 8, sampling=chosen, output=output)
    while engine.load.waiting or engine.stats.n_steps < 8:
        engine.step()
    seconds = []
    for _ in range(_N_STEPS // 2):
        before = engine.stats.seconds
        engine.step()
        seconds.append(engine.stats.seconds - before)
    engine.end_all(RuntimeError("measured"))
    return seconds
