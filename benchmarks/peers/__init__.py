"""Holds adapters of other libraries' memories for `memory.testing`, on small random models."""
