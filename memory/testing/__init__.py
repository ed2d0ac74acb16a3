"""Tests whether a memory of sequences keeps the promises of this library. Any memory with an adapter can be tested.

`python -m hybridmem.memory.testing MODULE:FACTORY` prints which promises are kept. `docs/how-to/testing-a-memory.md`
shows how to use it.
"""

from hybridmem.memory.testing.adapter import AbsentError, Adapter, Agreement, Factory, InjectedError, RefusedError
from hybridmem.memory.testing.checking import Result, check, check_for, is_good_enough, load_factory
from hybridmem.memory.testing.hybrid_adapter import HybridAdapter
from hybridmem.memory.testing.promises import PROMISES

__all__ = [
    "PROMISES",
    "AbsentError",
    "Adapter",
    "Agreement",
    "Factory",
    "HybridAdapter",
    "InjectedError",
    "RefusedError",
    "Result",
    "check",
    "check_for",
    "is_good_enough",
    "load_factory",
]
