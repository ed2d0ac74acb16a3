"""Simulates a fleet with each routing policy, and prints the results, for `hybrid-memory simulate --fleet N`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from hybridmem.chat.commands.fleet_options import ROUTERS
from hybridmem.chat.console import make_console
from hybridmem.cluster.simulation.fleet import FleetSetup, simulate_fleet
from hybridmem.cluster.simulation.replicas import Sizes
from hybridmem.cluster.simulation.sessions import FleetHabits
from hybridmem.memory import MemorySpec, SpecError
from hybridmem.memory.blocks import read_budget
from hybridmem.memory.views import format_bytes

COLUMNS = (
    ("reused", "reused_share", "{:.1%}"), ("with the store", "with_store_share", "{:.1%}"),
    ("of one memory's", "of_ideal", "{:.1%}"), ("turns moved", "moved_share", "{:.1%}"),
    ("imbalance", "imbalance_mean", "{:.2f}"), ("p99", "imbalance_p99", "{:.2f}"),
    ("first token p50, ms", "first_token_p50_ms", "{:.1f}"), ("p99, ms", "first_token_p99_ms", "{:.1f}"),
)  # fmt: skip
"""The title, the key and the format of each column of shares and times."""


def simulate_policies(
    setup: FleetSetup, habits: FleetHabits, spec: MemorySpec, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Play the same sessions with each policy, and return a report for each."""
    sizes = Sizes.of(spec)
    found = {}
    for policy in ROUTERS:
        report = simulate_fleet(replace(setup, policy=policy), habits, sizes, seed).to_json()
        for name in ("first_token_p50", "first_token_p99"):
            report[f"{name}_ms"] = 1000 * report[f"{name}_seconds"]
        found[policy] = report
    return found


def run_simulation(numbers: dict[str, Any], spec: MemorySpec, json_file: Path | None) -> None:
    """Simulate a fleet by the options of the command line, and print a table. Raises SpecError.

    Args:
        numbers: `replicas`, `budget`, `grid_tokens` and `seed`, and fields of `FleetHabits`.
    """
    budget_bytes = read_budget(numbers.pop("budget"))
    seed, grid_tokens = numbers.pop("seed"), numbers.pop("grid_tokens")
    setup = FleetSetup(numbers.pop("replicas"), budget_bytes=budget_bytes, grid_tokens=grid_tokens)
    habits = FleetHabits(**numbers)
    found = simulate_policies(setup, habits, spec, seed=seed)
    make_console().print(_table(setup, habits, found))
    if json_file is not None:
        about = {"setup": asdict(setup), "habits": asdict(habits), "policies": found}
        try:
            json_file.write_text(json.dumps(about, indent=1) + "\n")
        except OSError as error:
            raise SpecError(f"{json_file} cannot be written ({error}); give another path") from error


def _table(setup: FleetSetup, habits: FleetHabits, found: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=f"{setup.n_replicas:,} replicas, {habits.n_sessions:,} sessions: shares of prompt tokens")
    for title in ("router", *(column[0] for column in COLUMNS), "read from the store", "CPU s"):
        table.add_column(title, justify="left" if title == "router" else "right")
    for policy, report in found.items():
        cells = [style.format(report[key]) for _, key, style in COLUMNS]
        table.add_row(policy, *cells, format_bytes(report["fetched_bytes"]), f"{report['cpu_seconds']:.1f}")
    return table
