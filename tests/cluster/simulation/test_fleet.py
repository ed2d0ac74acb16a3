"""A simulated fleet counts what its routers do. Our router reuses as much as a single memory would."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hybridmem.chat.cli import app
from hybridmem.cluster.simulation.fleet import FleetReport, FleetSetup, simulate_fleet
from hybridmem.cluster.simulation.replicas import SimulatedCache, Sizes
from hybridmem.cluster.simulation.sessions import FleetHabits, make_turns
from hybridmem.memory import SpecError

HABITS = FleetHabits(600, turns=4, sessions_per_second=20, think_seconds=20, n_openings=8)
SIZES = Sizes(np.arange(1, 513) * 64_000, np.arange(512) * 50_000)


def played(policy: str, **given: float) -> FleetReport:
    return simulate_fleet(FleetSetup(10, policy, **{"budget_bytes": 1 << 30, **given}), HABITS, SIZES)  # type: ignore[arg-type]


def test_turns_of_a_session_follow_each_other_and_carry_their_history() -> None:
    turns = make_turns(FleetHabits(200, edits=0), seed=3)
    for session in range(200):
        mine = np.flatnonzero(turns.session == session)
        assert turns.number[mine].tolist() == list(range(len(mine)))
        ends = turns.n_prompt[mine] + turns.n_reply[mine]
        assert (turns.n_kept[mine][1:] == ends[:-1]).all() and turns.n_kept[mine][0] == 0
    assert (np.diff(turns.at) >= 0).all() and len(turns) == pytest.approx(800, rel=0.2)


def test_ours_reuses_what_one_memory_would_and_blind_routers_do_not() -> None:
    ours, blind = played("resumable"), played("round-robin")
    assert ours.n_turns == blind.n_turns and ours.ideal_tokens == blind.ideal_tokens
    assert ours.reused_tokens >= 0.95 * ours.ideal_tokens > 1.2 * blind.reused_tokens
    assert blind.fetched_bytes > 10 * ours.fetched_bytes
    hashed = played("consistent-hash")
    assert hashed.moves == 0 and hashed.reused_tokens < ours.reused_tokens


def test_without_a_store_nothing_is_fetched_and_what_has_no_room_is_computed_again() -> None:
    report = played("consistent-hash", store_bytes_per_second=0.0, budget_bytes=100 << 20)
    assert report.fetched_tokens == report.stored_bytes == 0
    assert report.reused_tokens < played("consistent-hash").reused_tokens


def test_a_cache_stays_within_its_budget_and_says_what_it_lost() -> None:
    lost: list[bytes] = []
    cache = SimulatedCache(100, lost.append)
    for key in (b"a", b"b"):
        cache.add(key, 40)
    cache.use(b"a")
    cache.add(b"c", 40)
    assert lost == [b"b"] and cache.used_bytes == 80 and b"a" in cache


def test_the_command_prints_a_row_for_each_router_and_refuses_what_it_does_not_simulate(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    command = ["simulate", "--fleet", "4", "--users", "50", "--rate", "5", "--json", str(file)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert set(json.loads(file.read_text())["policies"]) == {"resumable", "consistent-hash", "round-robin", "load"}
    refused = CliRunner().invoke(app, ["simulate", "--fleet", "4", "--pauses", "0.5"])
    assert refused.exit_code == 1 and "--pauses is not simulated with --fleet" in refused.output
    with pytest.raises(SpecError, match=r"turns=0\.5"):
        FleetHabits(turns=0.5)
