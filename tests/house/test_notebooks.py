"""Each notebook runs from top to bottom and ends in assertions. The files hold source and nothing else."""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client import KernelManager
from nbclient import NotebookClient

from tests.extent import only_in_long

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

_MOST_LINES = 15
_CELL_SECONDS = 600
"""The first step of a fresh set-up compiles kernels, which takes a slow machine minutes."""


_FRESH = """
import os, matplotlib
os.chdir({folder!r})
matplotlib.rcdefaults()
%reset -f
"""
"""What is run before each notebook: its folder, no names and no style of those before it."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """Return one kernel for all notebooks, so that imports happen once.

    It works whether or not the library is installed, and without the startup files of the user's IPython.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython")),
            "OMP_NUM_THREADS": "1",  # The tests set this too, because these models are tiny.
        }
    )
    yield manager
    manager.shutdown_kernel(now=True)


@only_in_long
@every_notebook
def test_runs(path: Path, kernel: KernelManager, tmp_path: Path) -> None:
    """A notebook runs in an empty folder, and as if it were the kernel's first."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(_FRESH.format(folder=str(tmp_path))))
    client = NotebookClient(notebook, km=kernel, timeout=_CELL_SECONDS, startup_timeout=_CELL_SECONDS)
    try:
        client.execute()
    finally:
        client.kc.stop_channels()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "it shows no figure"


@every_notebook
def test_is_tidy(path: Path) -> None:
    tidy = runpy.run_path(str(ROOT / "notebooks" / "tidy.py"))["tidy"]
    assert path.read_text(encoding="utf-8") == tidy(path), "run python notebooks/tidy.py"


@every_notebook
def test_has_its_shape(path: Path) -> None:
    """A notebook has a title, short cells, and assertions at the end.

    It uses what is installed, not tests or benchmarks.
    """
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
