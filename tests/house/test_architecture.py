"""The tests check which package imports what from where, and how large files may be.

`lint-imports` checks the direction.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("memory", "models", "chat", "cluster", "training", "fuzzing")
SOURCES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def test_other_packages_import_from_rooms_of_memory_and_not_from_inside_them() -> None:
    """The `__init__` of a room publishes what others use, so that its modules may change."""
    inside = [
        f"{path.relative_to(ROOT)}: {node.module}"
        for package in ("models", "chat", "cluster")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("hybridmem.memory.")
        and (node.module or "").count(".") > 2
        and node.module != "hybridmem.memory.kernels.cpu.parts"
    ]
    assert not inside, "import these names from the package one level up, which lists them in its __init__"


def test_files_stay_short() -> None:
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in SOURCES}
    assert {name: n for name, n in lines.items() if n > 500} == {}
    assert {name: n for name, n in lines.items() if n > 250 and name.startswith("models/families/")} == {}


def test_importing_models_needs_only_what_transformers_lists() -> None:
    """Other names may disappear in any release. Imports inside of a function count only when it runs."""
    import transformers

    for path in (path for path in SOURCES if path.parent.name in ("models", "families")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
                assert node.module == "transformers", f"{path.name} imports from {node.module}"
                assert [alias.name for alias in node.names if not hasattr(transformers, alias.name)] == []


def test_there_is_no_utils() -> None:
    assert not [p for p in SOURCES if p.name == "utils.py"]
