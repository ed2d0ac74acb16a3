"""The examples run unchanged, are short, and say what they show."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.extent import few_cases

FOLDER = ROOT / "examples"
PRINTED = {
    "roll_back": ["Your cat is called Milo.", "Your cat is called Luna.", "30 tokens again"],
    "many_users": ["Your cat is called Milo.", "Your cat is called Luna.", "tokens were reused"],
    "own_model": ["largest difference after going back: 0.0"],
    "own_policy": ["every row takes", "LongValues(64) takes"],
    "attach_transformers": ["Okay, noted.", "14 tokens, as 14"],
}
"""Example -> what it prints."""


def test_each_file_is_an_example() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == PRINTED.keys()


@few_cases
@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs_and_is_short(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = FOLDER / f"{name}.py"
    assert path.read_text().count("\n") <= 60 and ast.get_docstring(ast.parse(path.read_text()))
    runpy.run_path(str(path))
    printed = capsys.readouterr().out
    assert [words for words in PRINTED[name] if words not in printed] == []
