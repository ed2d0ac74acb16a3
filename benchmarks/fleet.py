"""Simulates a fleet of a size that no test can run: 200 replicas under a million sessions, with each router."""

from __future__ import annotations

from benchmarks.harness import Report
from benchmarks.workloads import CONFIGS
from hybridmem.cluster.commands.fleet import COLUMNS, simulate_policies
from hybridmem.cluster.simulation.fleet import FleetSetup
from hybridmem.cluster.simulation.sessions import FleetHabits
from hybridmem.memory.views.text_tables import format_bytes
from hybridmem.models import plan_memory

BUDGET_BYTES = 16 << 30


def fleet(*, quick: bool) -> Report:
    """Simulate 200 replicas under a million sessions, by each router: what is reused, moved, and how even load is.

    The sizes of checkpoints are those of the 120M Jamba; users draw one of 64 system prompts of 1,024 tokens.
    """
    report = Report("fleet")
    config = CONFIGS["jamba"]()
    spec = plan_memory(config, "JambaForCausalLM", dtype="bfloat16")
    n_replicas, n_sessions = (20, 20_000) if quick else (200, 1_000_000)
    setup = FleetSetup(n_replicas, budget_bytes=BUDGET_BYTES)
    habits = FleetHabits(n_sessions, sessions_per_second=1.5 * n_replicas)
    for policy, found in simulate_policies(setup, habits, spec).items():
        shares = {title: style.format(found[key]) for title, key, style in COLUMNS}
        moved = {
            name: format_bytes(found[f"{what}_bytes"]) for name, what in (("read", "fetched"), ("written", "stored"))
        }
        report.add(
            f"{n_replicas:,} replicas, {n_sessions:,} sessions",
            {"router": policy, "turns": found["n_turns"], **shares, **moved, "CPU s": found["cpu_seconds"]},
        )
    report.notes.append(
        f"Each replica: {format_bytes(BUDGET_BYTES)} for checkpoints, {setup.prefill_tokens_per_second:,.0f} tokens of "
        f"prompts and {setup.decode_tokens_per_second:,.0f} of each reply a second; the store moves "
        f"{format_bytes(int(setup.store_bytes_per_second))} a second to each. Sessions of {habits.turns:g} turns on "
        f"average begin {habits.sessions_per_second:,.0f} times a second; {habits.edits:.0%} of later turns edit."
    )
    return report
