"""Strip the notebooks before a commit: no outputs, no counts, little metadata, cells numbered.

A diff then shows what somebody wrote, and nothing that an editor or a run has left.
"""

from __future__ import annotations

from pathlib import Path

import nbformat

FOLDER = Path(__file__).parent


def tidy(path: Path) -> str:
    """The stripped text of a notebook; the file stays as it is."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook.nbformat_minor = 5
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{number:02}"
        cell.metadata = {}
        cell.source = cell.source.strip()
        cell.pop("attachments", None)
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
    nbformat.validate(notebook)
    return nbformat.writes(notebook).rstrip("\n") + "\n"


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        path.write_text(tidy(path), encoding="utf-8")
