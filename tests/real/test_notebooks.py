"""The first notebook runs with a real model, up to its last assertion."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import pytest

from tests.real.conftest import of_package
from tests.real.download import SMOLLM_2

NOTEBOOK = Path(__file__).parent.parent.parent / "notebooks" / "1-quick-start.ipynb"


def test_the_first_notebook_runs_with_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sum('MODEL = "embedded"' in source for source in sources) == 1
    monkeypatch.setattr(matplotlib, "rcParams", matplotlib.rcParams.copy())
    matplotlib.use("agg")
    names: dict[str, object] = {}
    for source in sources:
        exec(source.replace('MODEL = "embedded"', f"MODEL = {str(of_package(SMOLLM_2))!r}"), names)
    assert names["ours"] and "assert " in sources[-1]
