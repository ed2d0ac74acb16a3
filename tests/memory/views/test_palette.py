"""Each concept has one colour, on the page and in pictures. Every reader can tell the colours of a view apart."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from hybridmem.chat.server.page_palette import PATH, palette_css
from hybridmem.memory.views.palette import COLOURS, SCHEMES, VIEWS, pool_colours, shades

ROOT = Path(__file__).parent.parent.parent.parent
PAGE = ROOT / "chat" / "server" / "page"
SIGHTS = {
    "all cones": np.eye(3),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
"""How linear RGB is seen (Machado, Oliveira and Fernandes 2009)."""
_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def seen(colour: str, sight: str) -> np.ndarray:
    """Return a colour in CIELAB, in which distances are those that people see."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(np.maximum(_XYZ @ np.clip(SIGHTS[sight] @ linear, 0, 1) / [0.9505, 1, 1.089], 0.008856))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_colours_of_a_view_can_be_told_apart(view: str, is_dark: bool, sight: str) -> None:
    """They differ by at least ten units of CIELAB. People just notice a difference of 2.3."""
    for a, b in combinations(VIEWS[view], 2):
        distance = np.linalg.norm(seen(SCHEMES[a][is_dark], sight) - seen(SCHEMES[b][is_dark], sight))
        assert distance > 10, f"{a} and {b}"


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_no_two_concepts_share_a_colour(is_dark: bool) -> None:
    found = shades(is_dark=is_dark)
    assert len(set(found.values())) == len(found) > len(COLOURS)


def test_pools_of_a_kind_share_a_hue_and_no_colour() -> None:
    pools = ["pages", "pages of a window", "states", "tails", "states of attention 0", "tails of attention 0"]
    assert pool_colours(pools) == ["pages", "pages-1", "states", "tail", "states-1", "tail-1"]
    assert set(pool_colours(pools)) <= shades().keys()


def test_the_page_has_the_colours_of_the_palette() -> None:
    assert PATH.read_text() == palette_css(), "run python -m hybridmem.chat.server.page_palette"


def test_a_concepts_colour_is_written_nowhere_else() -> None:
    """Neither other style sheets and scripts of the page nor pictures write it."""
    own = {colour for pair in SCHEMES.values() for colour in pair}
    files = [path for path in PAGE.iterdir() if path.suffix in (".css", ".js") and path.name != PATH.name]
    files += [*(ROOT / "memory" / "pictures").glob("*.py"), *(ROOT / "chat" / "simulation").glob("*.py")]
    for path in files:
        written = set(re.findall(r"#[0-9a-f]{6}", path.read_text().lower()))
        assert not written & own, path.name
        names = re.findall(r"--([\w-]+): ", path.read_text()) if path.suffix == ".css" else []
        assert not set(names) & SCHEMES.keys(), path.name
