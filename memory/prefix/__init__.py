"""Caches prefixes: keeps checkpoints of earlier prompts, and finds them by their tokens."""

from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.memory.prefix.lookup import Lookup, PrefixStats

__all__ = ["Lookup", "PrefixCache", "PrefixStats"]
