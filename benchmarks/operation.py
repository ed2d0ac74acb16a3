"""Runs many seeds of the engine and of the server in simulated time, and counts what happened in them."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from benchmarks.harness import Report
from tests.operation.runs import EXPECTED, SIMULATIONS

_SEEDS_A_TASK = 20


def operation(what: Iterable[str], first: int, n_seeds: int, jobs: int) -> tuple[Report, bool]:
    """Return the table, and True if every seed kept every promise and each required kind of event happened.

    Args:
        what: keys of `SIMULATIONS`.
        first: the lowest seed.
        jobs: the number of processes.
    """
    events: dict[str, Counter[str]] = {name: Counter() for name in what}
    broken: list[str] = []
    seconds = Counter[str]()
    last = first + n_seeds
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        tasks = [
            pool.submit(_operate, name, start, min(start + _SEEDS_A_TASK, last))
            for start in range(first, last, _SEEDS_A_TASK)
            for name in events
        ]
        for task in as_completed(tasks):
            name, found, taken, faults = task.result()
            events[name] += found
            seconds[name] += taken
            broken += faults
    report = Report("operation")
    for name, found in events.items():
        row = {"what": name, "seeds": f"{first} to {last - 1}", "n": n_seeds, "seconds": seconds[name]}
        report.add("simulated operation", row | {"broken": sum(line.startswith(name) for line in broken)})
        for event, n in sorted(found.items()):
            report.add(f"what happened to the {name}", {"event": event, "times": n})
        broken += [f"{name}: {event} never happened" for event in sorted(EXPECTED[name] - found.keys())]
    report.notes = broken
    return report, not broken


def _operate(name: str, first: int, last: int) -> tuple[str, Counter[str], float, list[str]]:
    """Run some seeds. An exception of one seed is reported as a fault, and the next seed runs all the same."""
    torch.set_num_threads(1)
    events, faults, start = Counter[str](), list[str](), time.perf_counter()
    for seed in range(first, last):
        try:
            events += SIMULATIONS[name](seed)
        except Exception as error:
            faults.append(f"{name}, seed {seed}: {type(error).__name__}: {error}"[:500])
    return name, events, time.perf_counter() - start, faults
