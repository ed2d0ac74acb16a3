"""The tests count: flat files of a folder, lines of files, and names on the pages about the house."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import grimp
import pytest

from hybridmem.memory import HybridMemory
from hybridmem.memory.interface import LayerMemory

ROOT = Path(__file__).parent.parent.parent
MOST_FLAT = {"memory": 16, "models": 1, "chat": 5, "cluster": 5}
"""Flat Python files of a package, its `__init__` included."""


@pytest.mark.parametrize("package", MOST_FLAT)
def test_packages_are_rooms(package: str) -> None:
    assert len(list((ROOT / package).glob("*.py"))) <= MOST_FLAT[package]


def test_lines_end_before_column_120() -> None:
    """Text for a tool at the end of a line, such as `# type: ignore`, does not count."""
    paths = [path for folder in (*MOST_FLAT, "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    lines = [
        (path, re.split(r"  # (?:type|noqa|fmt)\b", line)[0]) for path in paths for line in path.read_text().split("\n")
    ]
    assert len(paths) > 400 and [(path, line) for path, line in lines if len(line.rstrip()) > 120] == []


def test_the_contract_has_eleven_layers_and_counts_imports_for_types() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    contract = text[text.index('containers = ["hybridmem.memory"]') :]
    layers = re.findall(r'^    "(.+)",$', contract[: contract.index("]\n", contract.index("layers = "))], re.MULTILINE)
    assert len(layers) == 11 and "exclude_type_checking_imports = false" in text


def test_the_lowest_python_is_said_alike() -> None:
    """All places name the same lowest Python. It is the one that transformers, which is always installed, asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lowest = project["project"]["requires-python"].removeprefix(">=")
    assert project["tool"]["mypy"]["python_version"] == lowest
    assert project["tool"]["ruff"]["target-version"] == f"py{lowest.replace('.', '')}"
    assert f"Python {lowest} or newer" in (ROOT / "README.md").read_text()
    assert metadata("transformers")["Requires-Python"].startswith(f">={lowest}")


def test_the_distribution_is_called_hybridmem_everywhere() -> None:
    """`hybrid-memory` is the command's name.

    On the index it is the project of others, which a wrong page would install.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "hybridmem"
    assert set(project["scripts"]) == {"hybrid-memory", "hybridmem"} and len(set(project["scripts"].values())) == 1
    kinds = ("*.md", "*.py", "*.toml", "*.yml", "*.ipynb", "run")
    folders = (*MOST_FLAT, "docs", "notebooks", "benchmarks", "tests", ".ci")
    paths = [path for folder in folders for kind in kinds for path in (ROOT / folder).rglob(kind)]
    paths += [path for kind in kinds for path in ROOT.glob(kind)]
    wrong = re.compile(r"hybrid-memory\\?\[|install (?:-\S+ )*[\"']?hybrid-memory\b(?! (?:command|warmup))")
    assert (
        len(paths) > 900 and [path for path in paths if path != Path(__file__) and wrong.search(path.read_text())] == []
    )


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for types count as well."""
    graph = grimp.build_graph("hybridmem", cache_dir=None)
    left = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while ends := {module for module, imported in left.items() if not imported & left.keys()}:
        left = {module: imported for module, imported in left.items() if module not in ends}
    assert len(graph.modules) > 400 and sorted(left) == []


def test_public_names_are_few() -> None:
    assert len([name for name in dir(HybridMemory) if not name.startswith("_")]) <= 29
    assert HybridMemory.__bases__ == (object,)
    assert len([name for name in vars(LayerMemory) if not name.startswith("_")]) <= 18


@pytest.mark.parametrize("page", ["where-to-change", "architecture"])
def test_pages_name_files_that_exist(page: str) -> None:
    named = re.findall(r"`((?:memory|models|chat|cluster)/[\w/.]+)`", (ROOT / "docs" / f"{page}.md").read_text())
    assert len(named) >= 20 and [path for path in named if not (ROOT / path).exists()] == []


def test_tests_read_no_private_fields() -> None:
    """What only a look inside can say has a function with a name, in a file for such functions."""
    may_look = {ROOT / "tests" / "inside.py", ROOT / "tests" / "chat" / "engines.py"}
    texts = {path: path.read_text() for folder in (*MOST_FLAT, "tests") for path in (ROOT / folder).rglob("*.py")}
    tests = {path: text for path, text in texts.items() if path.is_relative_to(ROOT / "tests")}
    library = "".join(text for path, text in texts.items() if path not in tests)
    private = set(re.findall(r"\bself\.(_[a-z]\w*)(?=[^=\n]* = )", library))
    read = {path: set(re.findall(r"(?<!\bself)\.(_[a-z]\w*)", text)) for path, text in tests.items()}
    assert len(private) > 200
    assert {path: names & private for path, names in read.items() if names & private and path not in may_look} == {}


def test_the_list_of_changes_and_the_glossary_are_whole() -> None:
    rows = re.findall(
        r"^\| (?!to change|---)(.+?) \|", (ROOT / "docs" / "where-to-change.md").read_text(), re.MULTILINE
    )
    words = re.findall(r"^\| (?!word \||---)(.+?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(rows) >= 20 and len(words) >= 48 and len(set(words)) == len(words)
