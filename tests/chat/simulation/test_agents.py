"""Traces of simulated agents have the right lengths, and what agents send again is reused."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from hybridmem.chat.cli import app
from hybridmem.chat.simulation.agents import AgentHabits, AgentWorkload
from hybridmem.chat.simulation.traces import read_trace, write_trace
from hybridmem.memory import SpecError
from tests.extent import only_in_long


def test_traces_have_the_published_medians() -> None:
    families = list(AgentWorkload(AgentHabits(n_agents=300), seed=3))
    own = [[e for e in family if e.user == family[0].user] for family in families]
    says = [[e for e in events if e.action == "say"] for events in own]
    assert 38 <= median(len(events) for events in says) <= 48
    assert 400 <= median(e.n_reply or 0 for events in says for e in events) <= 490
    last = [15_000 + sum((e.n_tokens or 0) + (e.n_reply or 0) for e in events) for events in says]
    assert 125_000 <= median(last) <= 160_000
    assert 0.5 <= sum(e.action == "branch" for family in families for e in family) / len(families) <= 3
    assert len({family[0].opening for family in families}) == 3


def test_traces_are_a_function_of_the_seed_and_survive_a_file(tmp_path: Path) -> None:
    one, same, other = (list(AgentWorkload(AgentHabits(n_agents=5), seed=seed)) for seed in (1, 1, 2))
    assert one == same != other
    write_trace(tmp_path / "trace.jsonl", one)
    read = read_trace(tmp_path / "trace.jsonl")
    assert sorted(e.at for family in read for e in family) == sorted(e.at for family in one for e in family)


@only_in_long
def test_agents_find_in_the_prefix_cache_what_they_send_again(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [
        "simulate", "--dry", "--quiet", "--workload", "agents", "--users", "4", "--turns", "12", "--budget", "8GiB",
        "--message-tokens", "200", "--reply-tokens", "40", "--json", str(tmp_path / "report.json"),
    ])  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    known = report["tokens"]
    reused = sum(n for row in known["reused"].values() for n in row.values())
    again = sum(n for row in known["recomputed"].values() for n in row.values())
    assert reused > 50 * again and set().union(*known["reused"].values()) <= {"prefix cache", "fork"}


def test_options_of_chats_are_refused_by_name(tmp_path: Path) -> None:
    for options, word in ((["--edits", "0.5"], "--edits"), (["--workload", "crowds"], "--workload crowds")):
        result = CliRunner().invoke(app, ["simulate", "--dry", "--quiet", "--workload", "agents", *options])
        assert result.exit_code == 1 and word in result.stderr
    with pytest.raises(SpecError, match=r"subagents=0\.9, retries=0\.2"):
        AgentHabits(subagents=0.9, retries=0.2)
