"""In the chat simulation, users in a crowd are told what they are told alone, and every byte comes back."""

from __future__ import annotations

import io
import itertools
import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hybridmem.chat.cli import app
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.simulation.alone import compare_alone, serve_alone
from hybridmem.chat.simulation.plots import timeline, write_plots
from hybridmem.chat.simulation.report import Answer, Report, Sample, Samples
from hybridmem.chat.simulation.simulation import Setup, Simulation, simulate
from hybridmem.chat.simulation.workload import Event, Habits, Workload, make_workload
from hybridmem.memory import FormatError, HybridMemory, SpecError
from hybridmem.models import LanguageModel, load_model
from tests.counting import Calls
from tests.extent import only_in_long

LIVELY = Habits(
    n_users=8,
    turns=4,
    rate=20,
    think_s=0.2,
    pause_s=0.5,
    edits=0.2,
    regenerations=0.15,
    branches=0.2,
    pauses=0.3,
    n_openings=2,
)
TALKS = ("say", "edit", "regenerate")
TIGHT = "3MiB"
"""Less than its users hold together, and more than any of them."""


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_model("embedded")


@pytest.fixture(scope="module")
def setup(model: LanguageModel, tokenizer: Tokenizer) -> Setup:
    return Setup(model.memory_spec, model, tokenizer, budget="16MiB", is_checked=True, poison=True)


@pytest.fixture(scope="module")
def dry(setup: Setup) -> Setup:
    return replace(setup, model=None, poison=False)


@pytest.fixture(scope="module")
def lively(setup: Setup) -> Report:
    """Play a simulation once, for several tests."""
    return simulate(setup, make_workload(LIVELY, 0))


def untimed(report: Report) -> dict[str, Any]:
    return {key: value for key, value in report.to_json().items() if key != "timings"}


# The tests below are about the promise.


def assert_nothing_lost(setup: Setup, workload: Workload, report: Report, which: str) -> None:
    compare_alone(setup, workload, report, which=which)
    assert report.tally.failed == {} and report.n_given_up == 0
    assert report.lost == [] and report.leaks == []
    assert report.start_bytes == report.end_bytes == 0
    assert report.is_ok


@only_in_long
def test_everybody_is_told_in_the_crowd_what_they_are_told_alone(setup: Setup, lively: Report) -> None:
    report = lively
    assert_nothing_lost(setup, make_workload(LIVELY, 0), report, "all")
    assert len(report.tally.answers) >= 2 * LIVELY.n_users and report.n_checked_alone == len(report.tally.answers)
    assert len(report.wrong) <= len(report.tally.answers) // 20, "the model is right nearly always"
    assert set(report.tally.actions) == {"arrive", "say", "edit", "regenerate", "branch", "pause", "leave"}
    assert report.tally.actions["leave"] == LIVELY.n_users + report.tally.actions["branch"]
    assert 0 < report.swapped["back"] <= report.swapped["host"] == report.tally.swaps["paused"]
    assert report.tally.samples.rows[-1].swapped == 0
    ways = {way for _, way in report.tally.reused}
    assert ways == {"as it stood", "swapped in", "rollback", "fork", "prefix cache"}


def test_a_small_budget_forces_users_out_and_nothing_is_lost(setup: Setup, tmp_path: Path) -> None:
    """Users are swapped to files, even in the middle of replies."""
    tight = replace(setup, budget=TIGHT, swap_dir=tmp_path, max_running=16, max_tokens=12)
    workload = make_workload(replace(LIVELY, n_users=12, rate=200), 1)
    report = simulate(tight, workload)
    assert_nothing_lost(tight, workload, report, "wrong")
    assert report.tally.engine.n_preempted > 0
    assert report.swapped["disk"] > 0 and report.tally.swaps["silent"] > 0 and report.n_evicted > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.environ.get("SIMULATION") != "full", reason="two hundred users; set SIMULATION=full")
def test_two_hundred_users(setup: Setup, tmp_path: Path) -> None:
    crowd = replace(setup, budget="6MiB", swap_dir=tmp_path, max_tokens=12)
    workload = make_workload(Habits(n_users=200, turns=4, rate=400, think_s=0.5, pause_s=1.0), 0)
    report = simulate(crowd, workload)
    assert_nothing_lost(crowd, workload, report, "wrong")
    assert len(report.tally.answers) > 400 and report.tally.engine.n_preempted > 0 and report.swapped["disk"] > 0


def test_a_leak_and_a_lost_answer_fail_the_simulation(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory takes one conversation for another.

    The simulation judges what was said, not what was meant.
    """
    workload = make_workload(replace(LIVELY, pauses=0.0, edits=0.0, regenerations=0.0, branches=0.0), 0)
    swap = iter(range(1_000_000))
    original = HybridMemory.step

    def mixed_up(memory: HybridMemory, requests: Any, **options: Any) -> Any:
        pairs = requests
        if isinstance(requests, list) and len(requests) > 3 and next(swap) % 2:
            (a, x), (b, y), *rest = requests
            if len(x) == len(y) == 1:
                pairs = [(a, y), (b, x), *rest]
        return original(memory, pairs, **options)

    monkeypatch.setattr(HybridMemory, "step", mixed_up)
    report = simulate(setup, workload)
    monkeypatch.undo()
    compare_alone(setup, workload, report)
    assert report.lost and not report.is_ok


def test_what_leaks_and_what_is_only_a_guess() -> None:
    answer = Answer(
        "a", 0, 0, "What is my cat called?", "Your cat is called Zoe.", "Your cat is called Milo.", ("Zoe",)
    )
    assert answer.is_leak and not answer.is_lost, "nobody has looked what the model says alone"
    assert replace(answer, alone=answer.expected).is_lost and replace(answer, alone=answer.expected).is_leak
    assert not replace(answer, alone=answer.answer).is_leak, "it says so alone as well"
    assert not replace(answer, answer=answer.expected, foreign=(), alone="anything").is_lost


@only_in_long
def test_a_branch_alone_is_served_from_the_beginning(setup: Setup) -> None:
    """It knows what was said before it branched and what it was told since. It knows nothing of the other branch."""
    family = [
        Event(0.0, "anna", "arrive"),
        say(1.0, "anna", "My cat is called Zoe.", "Okay, noted."),
        Event(2.0, "anna", "branch", into="berta"),
        say(3.0, "anna", "My dog is called Milo.", "Okay, noted."),
        say(3.5, "berta", "My dog is called Luna.", "Okay, noted."),
        say(4.0, "berta", "What is my cat called?", "Your cat is called Zoe.", asks=True),
        say(5.0, "berta", "What is my dog called?", "Your dog is called Luna.", asks=True),
        say(5.0, "anna", "What is my dog called?", "Your dog is called Milo.", asks=True),
    ]
    alone = serve_alone(setup, family, "berta") | serve_alone(setup, family, "anna")
    assert alone == {i: event.reply for i, event in enumerate(family) if event.asks}
    assert simulate(setup, [family]).wrong == []


def say(at: float, user: str, text: str, reply: str, *, asks: bool = False) -> Event:
    return Event(
        at,
        user,
        "say",
        text=text,
        reply=reply,
        asks=asks,
        value=reply.split()[-1].strip(".") if asks else text.split()[-1].strip("."),
    )


def test_an_edit_forgets_what_came_behind_it(setup: Setup) -> None:
    family = [
        Event(0.0, "anna", "arrive"),
        say(1.0, "anna", "My cat is called Zoe.", "Okay, noted."),
        say(2.0, "anna", "My dog is called Milo.", "Okay, noted."),
        replace(say(3.0, "anna", "My cat is called Luna.", "Okay, noted."), action="edit", turn=0),
        say(4.0, "anna", "What is my cat called?", "Your cat is called Luna.", asks=True),
        Event(5.0, "anna", "regenerate"),
        say(6.0, "anna", "What is my dog called?", "You have not told me that.", asks=True),
    ]
    report = simulate(setup, [family])
    assert [answer.is_right for answer in report.tally.answers] == [True, True, True]
    assert report.tally.regenerated == {"same words": 1}


# The tests below repeat a simulation.


@only_in_long
def test_everything_but_the_timings_follows_from_the_seed(setup: Setup) -> None:
    first, second, other = (
        untimed(simulate(setup, make_workload(replace(LIVELY, n_users=3), seed))) for seed in (3, 3, 4)
    )
    assert first == second != other


@only_in_long
def test_the_wall_clock_changes_no_counts_of_what_users_did(setup: Setup) -> None:
    workload = make_workload(replace(LIVELY, n_users=3), 5)
    virtual, wall = simulate(setup, workload), simulate(replace(setup, speed=20.0), workload)
    assert (virtual.clock, wall.clock) == ("virtual", "wall")
    assert virtual.tally.actions == wall.tally.actions
    assert sorted((a.user, a.index, a.answer) for a in virtual.tally.answers) == sorted(
        (a.user, a.index, a.answer) for a in wall.tally.answers
    )
    assert wall.virtual_seconds >= max(event.at for family in workload for event in family)


# The tests below are dry runs.


@only_in_long
def test_a_dry_run_keeps_the_books_of_the_real_one(dry: Setup, lively: Report) -> None:
    """A model says the right replies, and the books agree step by step and byte by byte."""
    real, made_up = lively, simulate(dry, make_workload(LIVELY, 0))
    assert real.wrong == []
    assert untimed(made_up)["samples"] == untimed(real)["samples"]
    for part in ("tokens", "scheduling", "bytes", "actions", "steps", "latency in steps"):
        assert untimed(made_up)[part] == untimed(real)[part], part


@only_in_long
def test_a_dry_run_needs_neither_texts_nor_a_tokenizer(dry: Setup) -> None:
    habits = Habits(n_users=50, turns=3, rate=50, message_tokens=30, reply_tokens=60)
    bare = replace(dry, tokenizer=None, stop_ids=(2,), budget="1GiB", max_running=256, step_tokens=1024)
    report = simulate(bare, make_workload(habits, 0))
    assert report.is_ok and report.tally.answers == []
    mean_tokens = report.tally.engine.n_generated / report.tally.actions["say"]
    assert 40 < mean_tokens < 120
    assert report.tally.reused["say", "prefix cache"] > 0, "openings are shared"
    with pytest.raises(FormatError, match="n_tokens"):
        simulate(bare, make_workload(LIVELY, 0))


@only_in_long
def test_a_dry_run_costs_the_same_for_every_user(dry: Setup) -> None:
    """The cost does not depend on how many users have come before.

    The memory is full, with about a hundred users at once.
    """
    bare = replace(dry, tokenizer=None, stop_ids=(2,), budget="64MiB", max_running=512, step_tokens=4096)
    habits = Habits(n_users=270, turns=2, rate=100, think_s=0.2, pause_s=0.5, message_tokens=12, reply_tokens=8)
    calls_at: dict[int, int] = {}
    with Calls() as calls:
        report = simulate(
            bare,
            make_workload(habits, 0),
            lambda simulation: calls_at.setdefault(simulation.n_families // 90, calls.n),
        )
    assert report.is_ok and report.n_evicted > 2 * habits.n_users, "the memory was full"
    early, late = calls_at[2] - calls_at[1], calls_at[3] - calls_at[2]
    assert late < 1.2 * early


def test_a_dry_run_has_nothing_to_write(dry: Setup, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="swap_dir"):
        simulate(replace(dry, swap_dir=tmp_path), [])


def test_users_who_cannot_be_swapped_are_computed_again(dry: Setup) -> None:
    """Without room in host memory, their sequences are closed, and computed again from their tokens."""
    report = simulate(replace(dry, host_budget=1), make_workload(LIVELY, 0))
    assert report.is_ok and report.swapped["host"] == 0 and report.tally.swaps["given up"] > 0
    without = simulate(replace(dry, host_budget=1, grid_tokens=None), make_workload(LIVELY, 0))
    assert without.is_ok and without.tally.recomputed.total() > report.tally.recomputed.total()


# The tests below are about reports.


def test_samples_stay_few_and_even() -> None:
    samples = Samples()
    for step in range(5000):
        if samples.is_due(step):
            samples.add(Sample(step, 0.0, 0, 0, 0, 0, 0, {}, 0, 0, 0, 0, 0))
    steps = [row.step for row in samples.rows]
    assert 100 < len(steps) <= 256 and len({b - a for a, b in pairwise(steps)}) == 1


def test_the_report_is_complete_json(lively: Report) -> None:
    report = lively
    found = json.loads(json.dumps(report.to_json()))
    engine = report.tally.engine
    assert found["tokens"]["fed"] == engine.n_fed and found["steps"] == engine.n_steps
    assert found["latency in steps"]["first token"]["n"] == sum(report.tally.actions[action] for action in TALKS)
    n_tokens = found["latency in steps"]["first token"]["n"] + found["latency in steps"]["between tokens"]["n"]
    assert n_tokens == found["tokens"]["generated"] == engine.n_generated
    assert {"p50", "p95", "p99"} <= set(found["timings"]["first token (s)"])
    last = found["samples"][-1]
    assert last["step"] <= engine.n_steps and sum(last["by_kind"].values()) <= found["bytes"]["peak"]


def test_plots_are_written(lively: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = write_plots(lively, tmp_path / "plots")
    assert {path.stem for path in paths} == {"latency", "bytes", "tokens", "users"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_notebook_shows_the_timeline(lively: Report) -> None:
    pytest.importorskip("matplotlib")
    figure, rows = timeline(lively), lively.tally.samples.rows
    users, tokens, held = figure.axes
    assert [ax.get_title(loc="left").split()[0] for ax in figure.axes] == ["What", "Tokens", "Bytes"]
    drawn = {line.get_label(): line.get_ydata().tolist() for ax in (users, tokens) for line in ax.lines}  # type: ignore[union-attr]
    assert drawn["running"] == [row.running for row in rows] and drawn["generated"] == [row.generated for row in rows]
    top = held.collections[-1].get_paths()[0].vertices[:, 1].max() * 2**20  # type: ignore[index]
    assert top == pytest.approx(max(sum(row.by_kind.values()) for row in rows))
    assert held.get_xlabel() and not users.get_xlabel()
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


# The tests below run the command.


def test_the_command_reports_and_replays(tmp_path: Path) -> None:
    trace, first, second = (tmp_path / name for name in ("trace.jsonl", "first.json", "second.json"))
    few = ["simulate", "--users", "4", "--turns", "2", "--seed", "3"]
    result = CliRunner().invoke(app, [*few, "--save-trace", str(trace), "--json", str(first)])
    assert result.exit_code == 0, result.output
    for words in ("answers are right", "p99", "prefix cache", "swapped", "tokens", "books balance"):
        assert words in result.stdout
    assert "\x1b" not in result.stdout
    result = CliRunner().invoke(app, ["simulate", "--trace", str(trace), "--json", str(second), "--quiet"])
    assert result.exit_code == 0, result.output
    found = [json.loads(path.read_text()) for path in (first, second)]
    for report in found:
        del report["timings"], report["workload"]
    assert found[0] == found[1]


@only_in_long
def test_the_command_runs_dry(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", "--dry", "--users", "30", "--json", str(tmp_path / "report.json")])
    assert result.exit_code == 0, result.output
    assert "virtual clock" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["tokens"]["generated"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--speed", "fast"], "--speed fast"),
        (["--speed", "-1"], "--speed -1"),
        (["--alone", "sometimes"], "--alone sometimes"),
        (["--rate", "0"], "rate"),
        (["--dry", "--swap-dir", "somewhere"], "swap_dir"),
        (["--budget", "1KiB"], "budget"),
        (["--json", "/nowhere/report.json", "--users", "1", "--turns", "1"], "/nowhere/report.json"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_what_the_command_refuses_is_one_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("error: ") and words in result.stderr


def test_plots_without_matplotlib_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hybridmem.memory.pictures.canvas.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["simulate", "--plots", str(tmp_path)])
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1 and "pip install" in result.stderr


def test_a_wrong_simulation_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Report, "is_ok", property(lambda self: False))
    assert CliRunner().invoke(app, ["simulate", "--users", "2", "--turns", "1", "--quiet"]).exit_code == 1


def test_the_live_view_draws_every_state(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from hybridmem.chat.simulation.view import _Dashboard

    monkeypatch.setattr(
        "hybridmem.chat.simulation.view.time", SimpleNamespace(perf_counter=itertools.count(1).__next__)
    )
    dashboard, console, seen = _Dashboard(), Console(width=150, record=True, file=io.StringIO()), []

    def watch(simulation: Simulation) -> None:
        dashboard.watch(simulation)
        console.print(dashboard)
        seen.append(simulation.engine.load.running)

    simulate(setup, make_workload(replace(LIVELY, n_users=2, turns=2), 0), watch)
    text = console.export_text()
    for words in ("running", "waiting", "paused", "tokens/s", "pages", "swapped out", "user 1"):
        assert words in text
    assert max(seen) > 0
