"""Draws pictures of a memory: with matplotlib, which is optional (pip install 'hybridmem[notebooks]'), and live."""

from memory.pictures.blocks import arena_map
from memory.pictures.forks import fork_tree
from memory.pictures.layers import layer_map
from memory.pictures.live import Watch, watch
from memory.views.palette import COLOURS

__all__ = ["COLOURS", "Watch", "arena_map", "fork_tree", "layer_map", "watch"]
