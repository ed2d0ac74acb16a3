"""The site builds strictly, needs nothing from the network, and shows the architecture of the source."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from hybridmem import memory
from tests.docs.pages import ROOT
from tests.extent import IS_LONG, only_in_long

KEY_PAGES = [
    f"{name}.html"
    for name in (
        "index concepts/index concepts/limits how-to/decode how-to/adding-a-policy reference/memory "
        "reference/command-line architecture results/peers results/decode glossary faq changelog"
    ).split()
]


class Loaded(HTMLParser):
    """Collects what a browser fetches to show a page.

    These are addresses of scripts, styles, images, icons and frames, but not of links to follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.addresses.append(found.get("href") or "")
        elif tag != "a":
            self.addresses += [found[name] or "" for name in ("src", "srcset", "data") if name in found]


@pytest.mark.skipif(not IS_LONG, reason="ten seconds for each change of a page; set TESTS=long")
def test_the_site_builds_strictly_and_needs_no_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert not re.search(r"^(WARNING|ERROR)", built.stdout + built.stderr, re.MULTILINE), built.stderr

    texts = {str(path.relative_to(tmp_path)): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert texts.keys() >= set(KEY_PAGES)
    for name, text in texts.items():
        loaded = Loaded()
        loaded.feed(text)
        assert loaded.addresses and not [a for a in loaded.addresses if re.match(r"(https?:)?//", a)], name
    for path in tmp_path.rglob("*.css"):
        assert not re.search(r"""(@import|url\()\s*["']?(https?:)?//""", path.read_text(encoding="utf-8")), path

    check_search((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    check_reference(texts)
    check_architecture(texts["architecture.html"])
    assert "<h1" in texts["changelog.html"] and "HybridMemory" in texts["changelog.html"]


def check_search(index: str) -> None:
    """Check that the search lists first the section whose heading says what newcomers look for."""
    titles = {unescape(entry["title"]).lower() for entry in json.loads(index)["docs"]}
    wanted = ("plain install", "licence", "what a checkpoint costs", "fork at an earlier position", "adding a model")
    assert [title for title in (*wanted, "examples") if title not in titles] == []


def check_reference(texts: dict[str, str]) -> None:
    """Check that everything that `hybridmem.memory` offers is in the reference."""
    reference = "".join(text for name, text in texts.items() if name.startswith("reference/"))
    for name in set(memory.__all__) - {"UNROTATED"}:
        assert re.search(rf'id="hybridmem\.memory\.[\w.]*\b{name}"', reference), name
    assert 'id="hybrid-memory-simulate"' in reference and "--rollback-window" in reference


def check_architecture(page: str) -> None:
    """Check that each module is listed with its own sentence, and that both drawings have each module of memory."""
    text = unescape(page)
    drawings = load_drawings()
    for package in drawings.PACKAGES:
        for name in drawings.describe_modules(ROOT, package):
            assert f'id="{name}"' in text, name
        n_modules = sum(1 for path in (ROOT / package).rglob("*.py") if path.read_text())
        assert n_modules == len(drawings.describe_modules(ROOT, package))
    house = drawings.read_house(ROOT)
    for module in house.modules:
        assert text.count(f">{module}</text>") == 3, module
    assert text.count("<circle") == len(house.imports) > 100


def load_drawings() -> ModuleType:
    return load_script("drawings")


@cache
def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # The dataclass of the module looks up its own module there.
    spec.loader.exec_module(module)
    return module


@only_in_long
def test_the_reference_has_signatures_and_first_sentences_in_the_repository() -> None:
    """`python docs/signatures.py` updates the pages."""
    signatures = load_script("signatures")
    for page in sorted(signatures.PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert text == signatures.make_page(text), f"{page.name} is old; run: python docs/signatures.py"
        assert text.count("\n::: ") == text.count("<!-- signatures") or "    options: {" in text, page.name
    memory_page = (signatures.PAGES / "memory.md").read_text(encoding="utf-8")
    assert "    fork(sequence: Sequence) -> Sequence\n        Open a new sequence that continues" in memory_page
    assert "horizons_after" not in memory_page.partition("```text")[2], "what the site hides is hidden here as well"
    assert "| `--budget` | `1GiB` | The memory" in (signatures.PAGES / "command-line.md").read_text(encoding="utf-8")


@only_in_long
def test_signatures_follow_the_source(tmp_path: Path) -> None:
    signatures = load_script("signatures")
    page = "# x\n\n::: memory.errors\n"
    made = signatures.make_page(page)
    assert "class CapacityError" not in made
    assert "CapacityError(message: str, *, needed: int, free: int, unit: str = 'bytes'" in made
    assert signatures.make_page(made) == made, "what was made before is replaced"
    assert signatures.MADE.sub("", made) == page, "and the site leaves it out"
    assert signatures.make_page(made.replace("The budget cannot hold", "Nothing can hold")) == made


def test_a_house_that_breaks_its_contract_is_not_drawn(tmp_path: Path) -> None:
    drawings = load_drawings()
    house = drawings.read_house(ROOT)
    upward = drawings.House(house.packages, house.floors, house.imports | {("errors", "hybrid")})
    with pytest.raises(ValueError, match=r"memory\.errors imports memory\.hybrid"):
        drawings.check_house(upward, set(house.modules))
    with pytest.raises(ValueError, match="newcomer"):
        drawings.check_house(house, {*house.modules, "newcomer"})
    (tmp_path / "silent").mkdir()
    (tmp_path / "silent" / "module.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="no docstring"):
        drawings.describe_modules(tmp_path, "silent")
