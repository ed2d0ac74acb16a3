"""Tests whether any memory of sequences that has an adapter keeps the promises of this library.

`python -m hybridmem.memory.testing MODULE:FACTORY` prints which promises are kept;
`docs/how-to/testing-a-memory.md` shows how.
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
