"""Caches prefixes: keeps checkpoints of earlier prompts, and finds them by their tokens."""

from memory.prefix.cache import PrefixCache
from memory.prefix.lookup import Lookup, PrefixStats

__all__ = ["Lookup", "PrefixCache", "PrefixStats"]
