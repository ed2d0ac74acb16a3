"""The engine: continuous batching of generations over one model and one memory."""

from chat.engine.engine import Engine

__all__ = ["Engine"]
