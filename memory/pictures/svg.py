"""Draws the map of the arena and the tree of forks as SVG text, in a few milliseconds and without matplotlib.

Numbers, rows and colours are those of `arena_map` and `fork_tree`. Only the drawing differs, because a live picture
must be fast: for 36 sequences, matplotlib takes 460 ms for a picture, while this module takes 10 ms for the map and 1
ms for the tree. `arena_map` and `fork_tree` use matplotlib, because they return a `Figure`, which users change and
save. The text has the grey of all pictures, so it can be read on dark and on light pages, and nothing is loaded or
executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from hybridmem.memory.pictures.blocks import rows_of
from hybridmem.memory.pictures.canvas import INK, ink_on, owner_shade
from hybridmem.memory.pictures.forks import Node, label_of, n_rows_of
from hybridmem.memory.views.palette import shades
from hybridmem.memory.views.text_tables import format_bytes

if TYPE_CHECKING:
    from hybridmem.memory.hybrid import HybridMemory

WIDTH = 760
_ROWS, _ROW, _GAP = 12, 14, 2
_LINE, _LEFT, _TREE_WIDTH, _CHARACTER = 20, 6, 420, 6.2
_FREE, _SHARED = "#80808026", "#00000099"
_MOST_NUMBERS = 200
Box = tuple[int, float, float, int]
"""The part of a range of the arena that lies in one row: the number of the range, left, right, and the row."""


def arena_svg(arena: dict[str, Any], budget_bytes: int) -> str:
    """Draw the ranges of `cells.arena_of` in rows that are read like lines of text, below a bar of the whole budget."""
    total = sum(end - start for start, end in arena["regions"])
    row_bytes = max(1, -(-total // _ROWS))
    boxes, scale = [*_boxes(arena, row_bytes)], WIDTH / max(1, budget_bytes)
    ranges = zip(arena["starts"], arena["ends"], strict=True)
    bar = [(i, start * scale, max(end * scale, start * scale + 1), -1) for i, (start, end) in enumerate(ranges)]
    body = [_path([(0, 0.0, float(WIDTH), row) for row in range(-1, _ROWS if total else 0)], _FREE)]
    coloured: dict[str, list[Box]] = {}
    for box in bar + boxes:
        coloured.setdefault(_colour(arena, box[0]), []).append(box)
    body += [_path(of_colour, colour) for colour, of_colour in coloured.items()]
    shared = [box for box in bar + boxes if arena["shared_percent"][box[0]] > 50]
    body += [_path(shared, _SHARED, height=2)] if shared else []
    body += _numbers(arena, boxes) if len(boxes) <= _MOST_NUMBERS else []
    title = f"{format_bytes(total)} of the arena, {format_bytes(row_bytes)} a row" if total else "nothing is in use"
    return _svg(_y(_ROWS if total else 0), body, title)


def arena_legend(arena: dict[str, Any]) -> str:
    """Return a legend of the pools' colours, as HTML."""
    of_pools = (shades()[name] for name in arena["pool_colours"])
    names = [*zip(of_pools, arena["pool_names"], strict=True)]
    swatch = '<span style="display:inline-block;width:.7em;height:.7em;margin:0 .35em 0 .9em;background:{}"></span>{}'
    keys = "".join(swatch.format(colour, escape(name)) for colour, name in [*names, (_FREE, "free")])
    return f"{keys}<span style='margin-left:.9em'>dark line: shared by several; numbers: ids of sequences</span>"


def tree_svg(memory: HybridMemory, roots: list[Node]) -> str:
    """Draw the trees of `forks.trees_of`: sequences and checkpoints along their tokens, and each branch's bytes."""
    most = max([1, *(len(s.tokens) for root in roots for s in root.sequences)])
    body, y = list[str](), 0
    for root in roots:
        body += _branch(memory, root, y, _TREE_WIDTH / most)
        y += n_rows_of(root)
    return _svg(y * _LINE + 4, body, f"tree of forks, up to {most:,} tokens")


def _branch(memory: HybridMemory, node: Node, row: int, scale: float) -> Iterator[str]:
    """Yield a node in a row, and the nodes below it in the rows below."""
    left, right, y = _LEFT + node.start * scale, _LEFT + node.end * scale, row * _LINE + _LINE / 2
    thickness = 2 if node.sequence else 4
    yield f'<path d="M{left:.1f} {y}H{right:.1f}" stroke="{INK}" stroke-width="{thickness}"/>'
    if s := node.sequence:
        fill, turn = "none" if s.is_swapped else INK, f' transform="rotate(45 {right:.1f} {y})"'
        corner = "" if s.is_checkpoint else ' rx="4"'
        yield f'<rect x="{right - 4:.1f}" y="{y - 4}" width="8" height="8"{corner} fill="{fill}" stroke="{INK}"'
        yield f"{turn if s.is_checkpoint else ''}/>"
    label = escape(label_of(node, memory))
    end = right + 10 + _CHARACTER * len(label) > WIDTH
    x, anchor = (WIDTH, ' text-anchor="end"') if end else (right + 10, "")
    yield f'<text x="{x:.1f}" y="{y + 4}"{anchor}>{label}</text>'
    below_row = row + 1
    for below in node.below:
        down = below_row * _LINE + _LINE / 2
        yield f'<path d="M{right:.1f} {y}V{down}" stroke="{INK}"/>'
        yield from _branch(memory, below, below_row, scale)
        below_row += n_rows_of(below)


def _boxes(arena: dict[str, Any], row_bytes: int) -> Iterator[Box]:
    """Yield the ranges cut into rows, regions one after the other."""
    before, scale = 0, WIDTH / row_bytes
    for first, last in arena["regions"]:
        for i, (start, end) in enumerate(zip(arena["starts"], arena["ends"], strict=True)):
            if not first <= start < last:
                continue
            for left, right, row in rows_of(before + start - first, before + end - first, row_bytes):
                yield i, left * scale, right * scale, row
        before += last - first


def _colour(arena: dict[str, Any], i: int) -> str:
    of_pool = shades()[arena["pool_colours"][arena["pools"][i]]]
    red, green, blue = owner_shade(of_pool, max(0, arena["owners"][i]))
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _y(row: int) -> int:
    return (row + 1) * (_ROW + _GAP) + (8 if row >= 0 else 0)


def _path(boxes: Iterable[Box], colour: str, height: int = _ROW) -> str:
    """Return boxes of one colour as a single path, because a large arena has a thousand boxes."""
    top = (_ROW - height) / 2
    d = "".join(
        f"M{left:.1f} {_y(row) + top:g}h{right - left:.1f}v{height}h{left - right:.1f}z"
        for _, left, right, row in boxes
    )
    return f'<path d="{d}" fill="{colour}"/>'


def _numbers(arena: dict[str, Any], boxes: list[Box]) -> Iterator[str]:
    for i, left, right, row in boxes:
        owner, red_green_blue = arena["owners"][i], _colour(arena, i)
        text = "in a step" if owner == -1 else "several" if owner == -2 else str(owner)
        if right - left > _CHARACTER * (len(text) + 1) and arena["shared_percent"][i] <= 50:
            red, green, blue = (int(red_green_blue[k : k + 2], 16) / 255 for k in (1, 3, 5))
            x, y, ink = (left + right) / 2, _y(row) + 11, ink_on((red, green, blue))
            yield f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill="{ink}">{text}</text>'


def _svg(height: float, body: Iterable[str], title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {max(1, height):g}" width="{WIDTH}" role="img" '
        f'style="max-width:100%;height:auto" font-family="sans-serif" font-size="11" fill="{INK}">'
        f"<title>{escape(title)}</title>{''.join(body)}</svg>"
    )
