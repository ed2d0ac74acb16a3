"""Defines the one color of each concept for all places that draw it: pictures, the web page, and tables in notebooks.

Most hues are those of Okabe and Ito (2008). Colours that occur together in one view also differ for colour-blind
readers, on light and on dark pages. A test computes by how much.
"""

from __future__ import annotations

from collections.abc import Sequence

SCHEMES: dict[str, tuple[str, str]] = {
    "pages": ("#0072b2", "#2f8fd0"),
    "states": ("#cc79a7", "#e3a3c6"),
    "tail": ("#e69f00", "#f2c14e"),
    "body": ("#56b4e9", "#a5dcff"),
    "head": ("#332288", "#7a5cff"),
    "reused": ("#009e73", "#2bbd92"),
    "replayed": ("#8a0f5a", "#b3247e"),
    "computed": ("#d55e00", "#e0581c"),
    "checkpoints": ("#7a4b00", "#a9703a"),
    "steps": ("#1f7a3d", "#3fa05f"),
    "chosen": ("#3d5bd8", "#aab9ff"),
    "swapped": ("#9a9aa2", "#70737e"),
    "shared": ("#999999", "#8a8d96"),
    "free": ("#e9e9e5", "#292c34"),
}
"""Maps a concept to its colours on light and on dark pages.

Bytes that are swapped out or shared are hatched or crossed in addition.
"""
COLOURS = {concept: light for concept, (light, _) in SCHEMES.items()}
"""Maps a concept to its colour in pictures, which is readable on white and on black pages."""
VIEWS: dict[str, tuple[str, ...]] = {
    "the page's memory": (
        "pages", "states", "tail", "body", "head", "reused", "replayed", "computed", "chosen", "free",
    ),
    "a map of the arena": ("pages", "states", "tail", "free"),
    "a map of layers": ("body", "tail", "head", "free"),
    "a bar of bytes": ("body", "tail", "head", "checkpoints", "steps", "shared", "free"),
    "a prompt": ("reused", "replayed", "computed"),
}  # fmt: skip
"""Maps a view to the concepts that it shows at once."""
_SHARES = (1.0, 0.65, 0.4)
"""How much of the color the first, second and third pool of a kind keep.

The other part is black, or white on dark pages.
"""


def kind_of(pool: str) -> str:
    """Return the concept to which a pool's blocks belong: "pages", "states" or "tail"."""
    return "tail" if "tail" in pool else "states" if "state" in pool else "pages"


def pool_colours(pools: Sequence[str]) -> list[str]:
    """Return a name in `shades` for each pool. Pools of one kind share a hue: "pages", "pages-1", "pages-2"."""
    kinds = [kind_of(pool) for pool in pools]
    numbers = [kinds[:i].count(kind) % len(_SHARES) for i, kind in enumerate(kinds)]
    return [f"{kind}-{number}" if number else kind for kind, number in zip(kinds, numbers, strict=True)]


def shades(*, is_dark: bool = False) -> dict[str, str]:
    """Return name -> colour of every concept, and of the second and third pool of each kind."""
    found = {concept: pair[is_dark] for concept, pair in SCHEMES.items()}
    for kind in ("pages", "states", "tail"):
        found |= {f"{kind}-{i}": _mixed(found[kind], share, is_dark) for i, share in enumerate(_SHARES) if i}
    return found


def _mixed(colour: str, share: float, with_white: bool) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(share * part + (1 - share) * 255 * with_white):02x}" for part in parts)
