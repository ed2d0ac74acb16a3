"""Prefix cache: checkpoints of prompts, found by their tokens."""

from memory.prefix.cache import Lookup, PrefixCache, PrefixStats

__all__ = ["Lookup", "PrefixCache", "PrefixStats"]
