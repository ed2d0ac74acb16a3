"""Caches prefixes: keeps checkpoints of earlier prompts, and finds them by their tokens."""

from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.memory.prefix.digests import Resumable, digests_at
from hybridmem.memory.prefix.lookup import Lookup, PrefixStats
from hybridmem.memory.prefix.saved import as_label

__all__ = [
    "Lookup",
    "PrefixCache",
    "PrefixStats",
    "Resumable",
    "as_label",
    "digests_at",
]
