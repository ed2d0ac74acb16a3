"""What a fleet's options need, and what they refuse."""

from __future__ import annotations

import importlib.util

import pytest
from typer.testing import CliRunner

from hybridmem.chat.cli import app


def test_replicas_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "hybridmem.chat.commands.fleet_options.find_spec", lambda name: None if name == "ray" else find_spec(name)
    )
    for command in (["serve", "--replicas", "2"], ["cluster", "deploy", "fleet.yaml"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1 and "several replicas need ray[serve]; install it with" in result.output
        assert "pip install 'hybridmem[cluster]'" in result.output


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--store", "./sessions"], "--store='./sessions' is of several replicas; give --replicas 2, or leave it"),
        (["--router", "load"], "--router='load' is of several replicas"),
    ],
)
def test_options_of_a_fleet_without_one_are_refused(options: list[str], error: str) -> None:
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 1 and error in " ".join(result.output.split())
