"""Benchmarks take fair turns, report no speed for wrong results, and write files that say where they come from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import architectures
from benchmarks.__main__ import app
from benchmarks.harness import Report, Samples, interleave, require_green
from benchmarks.ours import Ours
from benchmarks.workloads import Mixerless, Transformers
from hybridmem.models import load_model
from tests.extent import only_in_long
from tests.models.checkpoints import CONFIGS, Peer, write_checkpoint


def test_runs_take_turns_and_the_first_round_does_not_count() -> None:
    turns: list[str] = []
    times = interleave({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, 3, n_warm_up=1)
    assert turns == ["a", "b"] * 4
    assert [len(samples.seconds) for samples in times.values()] == [3, 3]


def test_samples() -> None:
    samples = Samples([i / 1000 for i in (9, 1, 2, 3, 4, 5, 6, 7, 8, 100)])
    assert (samples.median_ms, samples.mean_ms) == (5.5, 14.5)
    assert samples.spread == "2 … 9"


def test_a_report_is_written_twice(tmp_path: Path) -> None:
    report = Report("speed", notes=["a note"])
    report.add("times", {"model": "jamba", "ms": 1.23456, "n": 1234})
    report.write(tmp_path / "new")
    found = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert found["tables"] == {"times": [{"model": "jamba", "ms": 1.23, "n": 1234}]}
    assert (
        found["machine"]["torch"] == torch.__version__ and found["machine"]["torch threads"] == torch.get_num_threads()
    )
    text = (tmp_path / "new" / "speed.md").read_text()
    assert "| jamba | 1.23 | 1,234 |" in text and "a note" in text and torch.__version__ in text


@only_in_long
def test_red_tests_have_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Starting a process for each processor takes longer than such tests take.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-n 0")
    (tmp_path / "test_red.py").write_text("def test_red():\n    assert False\n")
    with pytest.raises(typer.Exit) as caught:
        require_green(str(tmp_path / "test_red.py"))
    assert caught.value.exit_code == 1
    (tmp_path / "test_green.py").write_text("def test_green():\n    pass\n")
    require_green(str(tmp_path / "test_green.py"))


@pytest.mark.parametrize("name", [pytest.param("jamba-no-experts", marks=only_in_long), "mamba"])
def test_both_sides_do_the_same_work(name: str, tmp_path: Path) -> None:
    """Both sides give the same greedy tokens after the same prompts. The step without mixers runs, and gives others."""
    folder = write_checkpoint(tmp_path, CONFIGS[name]())
    model, tokens = load_model(folder), torch.randint(0, 53, (3, 9))
    ours, theirs = Ours(model, 3, budget="16MiB"), Transformers(Peer.load(folder).model)
    ours.prefill(tokens)
    theirs.prefill(tokens)
    for _ in range(4):
        ours.next = theirs._next[:, 0].tolist()
        ours.decode()
        theirs.decode()
        assert ours.next == theirs._next[:, 0].tolist()
    bare = model(Mixerless(torch.tensor([5, 6, 7])))  # type: ignore[arg-type]
    assert bare.shape == (3, 53)


def test_parity_takes_names_of_checkpoints_and_how_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[list[str]] = []
    monkeypatch.setattr(architectures, "parity", lambda *, quick, names: (measured.append(names), Report("parity"))[1])
    for options in (
        ["--model", "lfm2-moe"], ["--model", "mamba2-tied", "--model", "lfm2-moe-no-bias", "--model", "lfm2-moe"], []
    ):  # fmt: skip
        assert CliRunner().invoke(app, ["parity", *options]).exit_code == 0
    of_lfm2_moe = [name for name in CONFIGS if name.startswith("lfm2-moe")]
    assert len(of_lfm2_moe) > 2
    assert measured[0] == of_lfm2_moe and measured[2] == list(CONFIGS)
    assert set(measured[1]) == {"mamba2-tied", *of_lfm2_moe} and len(measured[1]) == 1 + len(of_lfm2_moe)
    refused = CliRunner().invoke(app, ["parity", "--model", "lfm"])
    assert refused.exit_code == 2 and "lfm: choose one of" in refused.output


def test_the_parity_of_a_name_is_that_of_this_checkpoint_alone() -> None:
    (row,) = architectures.parity(names=["llama"], quick=False).tables["parity"]
    worst = max(row["one shot"], row["16 single steps"])
    assert row["checkpoint"] == "llama" and row["std of logits"] > 1 > 1e4 * worst
    with pytest.raises(ValueError, match=r"no parity of Llama; .* python -m benchmarks parity --out"):
        architectures._worst([row], "Llama")


def test_all_runs_each_command_in_a_process_of_its_own_and_says_which_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        ran.append(command[3:])
        return subprocess.CompletedProcess(command, 1 if command[3] == "rollback" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    outcome = CliRunner().invoke(app, ["all", "--quick", "--threads", "2", "--out", str(tmp_path)])
    assert outcome.exit_code == 1 and "failed: rollback" in outcome.output
    commands = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    assert {command[0] for command in ran} == commands - {
        "agent-trace",
        "all",
        "cluster",
        "compile",
        "conformance",
        "coverage",
        "failures",
        "fleet",
        "gguf",
        "gpu",
        "large",
        "llamacpp",
        "real",
        "locks",
        "operation",
        "page",
        "serving",
        "soak",
        "table",
        "tune",
    }
    assert all(command[1:] == ["--quick", "--out", str(tmp_path), "--threads", "2"] for command in ran)
