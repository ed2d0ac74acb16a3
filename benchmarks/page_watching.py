"""Measures how much slower decode steps are while a page watches the memory, in short turns with and without it."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness import Report
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.sampling.sampling import Sampling

_SETTLE_SECONDS, _TURN_SECONDS = 0.15, 0.6
_LISTENER = """
import sys, urllib.request
for url in sys.stdin:  # an address begins to listen, an empty line ends it
    if url.strip():
        response = urllib.request.urlopen(url.strip())
        print(len(response.readline()), flush=True)
    else:
        response.close()
        print(0, flush=True)
"""
"""Takes a stream in a process of its own, as a browser on another machine does. What it does not read, the kernel keeps
for it, so the server goes on sending while the processor is left to the steps."""


@contextmanager
def _listener() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", _LISTENER], stdin=-1, stdout=-1, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _tell(listener: subprocess.Popen[str], line: str) -> None:
    assert listener.stdin is not None and listener.stdout is not None
    listener.stdin.write(line + "\n")
    listener.stdin.flush()
    listener.stdout.readline()


def _seconds_a_step(engine: Engine) -> tuple[float, float]:
    """Return the seconds that a step takes, and the processor time that this process uses for it in all threads."""
    time.sleep(_SETTLE_SECONDS)
    n_steps, started, worked = engine.stats.n_steps, time.perf_counter(), time.process_time()
    time.sleep(_TURN_SECONDS)
    taken, ended, has_worked = engine.stats.n_steps - n_steps, time.perf_counter(), time.process_time()
    return (ended - started) / taken, (has_worked - worked) / taken


def slow_down(report: Report, url: str, engine: Engine, *, n_replies: int, n_rounds: int) -> None:
    """Measure decode steps in rounds, each with and without a watching page, in changing order at the same lengths.

    The standard errors are those of the medians of the rounds' ratios, by 1,000 draws with replacement (bootstrap).
    Processor time shows what watching adds even if another program slows this one.
    """
    endless = Sampling(temperature=1.0, logit_bias=tuple((i, -100.0) for i in engine.stop_ids))
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with _listener() as listener:
        for i in range(n_rounds + 1):
            for is_watched in ((False, True), (True, False))[i % 2]:
                alive = [engine.submit([1, 3, 50], max_tokens=10**5, sampling=endless) for _ in range(n_replies)]
                if is_watched:
                    _tell(listener, f"{url}/v1/memory/events?sequence=newest")
                taken = _seconds_a_step(engine)
                if is_watched:
                    _tell(listener, "")
                for generation in alive:
                    engine.cancel(generation)
                if i:  # The first round is a warm-up.
                    seconds[is_watched].append(taken)
    pairs = [*zip(seconds[False], seconds[True], strict=True)]
    slower, more = ([watched[k] / alone[k] for alone, watched in pairs] for k in (0, 1))
    report.add("a decode step while the memory is watched, ms", {
        "replies": n_replies, "alone": statistics.median(one for one, _ in seconds[False]) * 1e3,
        "watched": statistics.median(one for one, _ in seconds[True]) * 1e3,
        "slower by, %": 100 * (statistics.median(slower) - 1), "± %": _error_percent(slower),
        "more work of processors, %": 100 * (statistics.median(more) - 1), "± % ": _error_percent(more),
        "rounds": n_rounds, "asked, %": 2,
    })  # fmt: skip


def _error_percent(ratios: list[float]) -> float:
    draw = random.Random(0)
    return 100 * statistics.stdev(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
