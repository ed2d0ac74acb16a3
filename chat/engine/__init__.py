"""Generates replies to many requests at once: the engine batches them continuously, over one model and one memory."""

from hybridmem.chat.engine.engine import Engine

__all__ = ["Engine"]
