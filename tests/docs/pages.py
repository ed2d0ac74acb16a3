"""Reads the pages for people, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"\n]*)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = "not run: "
"""How the title of a block begins that cannot be run; the reason follows."""
OUTPUT = "output"
"""The title of what the block of Python before it prints."""


@dataclass(frozen=True)
class Block:
    """Holds a fenced block. `line` is its first line of code in the page, counted from 1."""

    language: str
    title: str
    code: str
    line: int


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read_blocks(page: Path) -> list[Block]:
    """Return all blocks of a page.

    Raises ValueError if a fence was not understood, because an unread block would not be checked.
    """
    text = page.read_text(encoding="utf-8")
    found = [Block(m[1], m[2] or "", m[3], text.count("\n", 0, m.start(3)) + 1) for m in _FENCE.finditer(text)]
    if 2 * len(found) != text.count("```"):
        raise ValueError(f'{page} has a fence that is none; write ```LANGUAGE or ```LANGUAGE title="TEXT"')
    return found


def read_prose(page: Path) -> str:
    """Return a page without its blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))
