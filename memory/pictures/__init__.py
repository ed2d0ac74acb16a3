"""Draws pictures of a memory: with matplotlib, which is optional (pip install 'hybridmem[notebooks]'), and live."""

from hybridmem.memory.pictures.blocks import arena_map
from hybridmem.memory.pictures.forks import fork_tree
from hybridmem.memory.pictures.layers import layer_map
from hybridmem.memory.pictures.live import Watch, watch
from hybridmem.memory.views.palette import COLOURS

__all__ = ["COLOURS", "Watch", "arena_map", "fork_tree", "layer_map", "watch"]
