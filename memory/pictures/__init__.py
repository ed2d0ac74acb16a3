"""Draws pictures of a memory: with matplotlib (optional: pip install 'hybridmem[notebooks]'), or live as SVG."""

from hybridmem.memory.pictures.blocks import arena_map
from hybridmem.memory.pictures.canvas import INK, entitle, literal, need_matplotlib, new_figure, plain
from hybridmem.memory.pictures.cells import arena_of
from hybridmem.memory.pictures.forks import fork_tree
from hybridmem.memory.pictures.layers import LayerRow, layer_map, layer_rows
from hybridmem.memory.pictures.live import Watch, watch
from hybridmem.memory.views.palette import COLOURS

__all__ = [
    "COLOURS",
    "INK",
    "LayerRow",
    "Watch",
    "arena_map",
    "arena_of",
    "entitle",
    "fork_tree",
    "layer_map",
    "layer_rows",
    "literal",
    "need_matplotlib",
    "new_figure",
    "plain",
    "watch",
]
