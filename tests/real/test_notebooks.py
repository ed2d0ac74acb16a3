"""The first two notebooks run with a real model: the first as it is, the second without its own assertions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from tests.real.conftest import of_package
from tests.real.download import SMOLLM_2

NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"


def run(name: str, monkeypatch: pytest.MonkeyPatch, is_run: Callable[[str], bool]) -> dict[str, Any]:
    """Run those cells of a notebook that are chosen, with SmolLM2 as its model. Return its names and their values."""
    cells = json.loads((NOTEBOOKS / name).read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sum('MODEL = "embedded"' in source for source in sources) == 1 and "assert " in sources[-1]
    monkeypatch.setattr(matplotlib, "rcParams", matplotlib.rcParams.copy())
    matplotlib.use("agg")
    names: dict[str, Any] = {}
    for source in filter(is_run, sources):
        exec(source.replace('MODEL = "embedded"', f"MODEL = {str(of_package(SMOLLM_2))!r}"), names)
    return names


def test_the_first_notebook_runs_with_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("1-quick-start.ipynb", monkeypatch, lambda source: True)["ours"]


def test_the_second_notebook_runs_with_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own assertions name what the embedded model says, and what a model with recurrent layers refuses."""
    names = run("2-rollback.ipynb", monkeypatch, lambda source: "assert " not in source)
    apart, memory = names["apart"], names["memory"]
    assert apart(names["rolled_back"]).max() < 1e-4, "no trace of what was dropped"
    assert "Zoe" in names["answer"] and "Milo" not in names["answer"]
    assert names["say"](memory.open(), names["edited"]) == names["answer"]
    memory.check()
