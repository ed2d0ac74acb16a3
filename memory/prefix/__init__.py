"""Caches prefixes: keeps checkpoints of earlier prompts, and finds them by their tokens."""

from memory.prefix.cache import Lookup, PrefixCache, PrefixStats

__all__ = ["Lookup", "PrefixCache", "PrefixStats"]
