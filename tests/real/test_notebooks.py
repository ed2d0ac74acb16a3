"""Notebooks run with a real model: the first as it is, the second and third without their own assertions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

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


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Matplotlib draws torch's tensors.
def test_the_third_notebook_runs_with_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its crowd and its live picture are left out: one takes minutes, and the other needs Jupyter.

    Each user's answer is the one that the user gets alone, forks share what they have in common, and so do prompts.
    """
    left_out = "assert ", "simulate(", "timeline(", "watch("
    names = run("3-many-users.ipynb", monkeypatch, lambda source: not any(word in source for word in left_out))
    memory, model, chances = names["memory"], names["model"], names["chances"]
    assert 0 < chances.min() and chances.max() < 1
    alone = memory.open()
    with memory.step({alone: names["prompts"]["Luna"]}) as step:
        expected = model(step).log_softmax(-1)[0]
    assert torch.allclose(names["asked"][names["names"].index("Luna")], expected, atol=1e-3)
    assert set(names["before"]) == {0} and max(names["after"]) < min(names["copied"]) / 2
    assert not names["turns"][0].n_reused and all(turn.n_computed < 40 for turn in names["turns"][1:])
    names["engine"].prefixes.clear()
    for sequence in (*names["forks"], alone):
        memory.close(sequence)
    memory.check()
    assert memory.usage().used_bytes == 0, "nothing is left behind"
