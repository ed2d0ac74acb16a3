"""The engine batches generations continuously over one model and one memory."""

from hybridmem.chat.engine.engine import Engine

__all__ = ["Engine"]
