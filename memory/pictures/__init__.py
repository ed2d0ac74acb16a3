"""Draws pictures of a memory with matplotlib, which is optional: pip install 'hybrid-memory[notebooks]'."""

from memory.pictures.blocks import arena_map
from memory.pictures.forks import fork_tree
from memory.pictures.layers import layer_map

__all__ = ["arena_map", "fork_tree", "layer_map"]
