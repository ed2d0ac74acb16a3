"""Each notebook runs from top to bottom in a kernel of its own and ends in assertions; the files hold source and
nothing else.
"""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

_MOST_LINES = 15
_CELL_SECONDS = 300
"""The first step of a fresh set-up compiles kernels, which takes a slow machine minutes."""


@every_notebook
def test_runs(path: Path, tmp_path: Path) -> None:
    """In an empty folder, whether or not the library is installed, and without what the user's IPython would start
    with.
    """
    (tmp_path / "work").mkdir()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "OMP_NUM_THREADS": "1",  # as the tests: these models are tiny
    }
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=_CELL_SECONDS,
        startup_timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path / "work")}},
    )
    client.execute(env=environment)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "it shows no figure"


@every_notebook
def test_is_tidy(path: Path) -> None:
    tidy = runpy.run_path(str(ROOT / "notebooks" / "tidy.py"))["tidy"]
    assert path.read_text(encoding="utf-8") == tidy(path), "run python notebooks/tidy.py"


@every_notebook
def test_has_its_shape(path: Path) -> None:
    """A title, short cells, and assertions at the end; it uses what is installed, not the tests or the benchmarks."""
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith(f"# {path.stem[0]}"), cells[0].source
    for source in (cell.source for cell in cells if cell.cell_type == "code"):
        assert sum(bool(line.strip()) for line in source.splitlines()) <= _MOST_LINES, source
        assert not re.search(r"^(from|import) (tests|benchmarks|training)", source, re.MULTILINE), source
    checks = next(i for i, cell in enumerate(cells) if re.search(r"^## Checks", cell.source, re.MULTILINE))
    assert sum(cell.source.count("assert ") for cell in cells[checks:]) >= 5
    assert cells[-1].cell_type == "code" and "assert " in cells[-1].source


def test_the_list_names_them_all() -> None:
    listed = (ROOT / "notebooks" / "README.md").read_text()
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        assert f"({path.name})" in listed, path.name
