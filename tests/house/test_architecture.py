"""The house: which way imports run, and how large files may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("memory", "models", "chat", "cluster", "training", "fuzzing")
SOURCES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def test_imports_run_one_way() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "importlinter.cli", "lint"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_short(path: Path) -> None:
    assert path.read_text().count("\n") <= 500


def test_importing_models_needs_only_what_transformers_lists() -> None:
    """Other names may go in any release. What is imported inside of a function is asked for when that runs."""
    import transformers

    for path in (path for path in SOURCES if path.parent.name in ("models", "families")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
                assert node.module == "transformers", f"{path.name} imports from {node.module}"
                assert [alias.name for alias in node.names if not hasattr(transformers, alias.name)] == []


def test_there_is_no_utils() -> None:
    assert not [p for p in SOURCES if p.name == "utils.py"]
