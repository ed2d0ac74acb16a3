"""Makes adapters of this library's own kinds of memory, over tiny models, such as `memory.testing.subjects:hybrid`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from hybridmem.memory.eviction import (
    H2O,
    TOVA,
    Budget,
    ExpectedAttention,
    KNorm,
    PyramidKV,
    Quest,
    Recent,
    Scissorhands,
    SnapKV,
)  # fmt: skip
from hybridmem.memory.quantization import Float8, Quantized, Storage
from hybridmem.memory.recurrences import FAMILIES
from hybridmem.memory.testing.adapter import Adapter
from hybridmem.memory.testing.hybrid_adapter import HybridAdapter
from hybridmem.memory.testing.toys import FamilyToy, Toy

POLICIES: dict[str, Budget] = {
    # Rows fold, but none is evicted, so outputs do not depend on when rows fold.
    "sparse": H2O(512, every=4),
    "h2o": H2O(9, recent=2, every=4),
    "recent": Recent(9, sinks=2, every=4),
    "knorm": KNorm(9, every=4),
    "tova": TOVA(9, every=4),
    "scissorhands": Scissorhands(9, recent=2, every=4),
    "snapkv": SnapKV(9, recent=2, observed=3, kernel=3, every=4),
    "pyramid": PyramidKV(9, recent=1, observed=3, kernel=3, every=4),
    "expected": ExpectedAttention(9, recent=2, every=4),
    # Queries read a small part of the rows. Which part depends only on a query's position and the rows up to it.
    "quest": Quest(16, recent=1, select_up_to=10**6),
}
STORAGES: dict[str, Storage] = {
    "8-bit": Quantized(8, group=4),
    "4-bit": Quantized(4, group=8),
    "2-bit": Quantized(2, group=8),
    "float8": Float8(group=4),
}


@cache
def _toy(**options: Any) -> Toy:
    return Toy(**options)


@cache
def _family_toy(name: str) -> FamilyToy:
    return FamilyToy(FAMILIES[name])


def hybrid(policy: str | None = None, storage: str | None = None, **options: Any) -> HybridAdapter:
    """Make a hybrid: attention, attention with a window, and recurrences. Options are those of `HybridMemory`."""
    own = ("window", "n_chosen", "span_tokens", "reproducible")
    toy = _toy(**{name: options.pop(name) for name in own if name in options})
    chosen = POLICIES[policy] if policy else None
    spec = toy.memory_spec.with_policy(chosen).with_storage(STORAGES[storage] if storage else None)
    return HybridAdapter(toy, spec, **({"same_bits": True} | options))


def attention(**options: Any) -> HybridAdapter:
    """Make a memory with attention layers only."""
    return HybridAdapter(_toy(recurrent=False), same_bits=True, **options)


def indexed(**options: Any) -> HybridAdapter:
    """Make a hybrid whose first attention reads four rows that an index chooses."""
    return hybrid(n_chosen=4, **options)


def recurrent(**options: Any) -> HybridAdapter:
    """Make a memory with recurrent layers only."""
    return HybridAdapter(_toy(attention=False), same_bits=True, **options)


def family(name: str, **options: Any) -> HybridAdapter:
    """Make a memory of two layers with one registered recurrence."""
    return HybridAdapter(_family_toy(name), same_bits=FAMILIES[name].is_exact, **options)


def all_subjects() -> dict[str, Callable[[], Adapter]]:
    """Return name -> factory for every kind, policy, storage, fold mode and registered recurrence."""
    found: dict[str, Callable[[], Adapter]] = {
        "hybrid": hybrid,
        "hybrid, window": partial(hybrid, window=5),
        "hybrid, replay": partial(hybrid, fold="replay"),
        "hybrid, no rollback window": partial(hybrid, rollback_window=0),
        "hybrid, pages of one token": partial(hybrid, page_tokens=1),
        "hybrid, reproducible": partial(hybrid, window=5, reproducible=True),
        "hybrid, small budget": partial(hybrid, budget="24KiB"),
        "hybrid, indexed": indexed,
        "hybrid, indexed, pages of one token": partial(indexed, page_tokens=1),
        "hybrid, indexed in spans": partial(indexed, span_tokens=2),
        "hybrid, indexed in spans, replay": partial(indexed, span_tokens=4, fold="replay"),
        "attention": attention,
        "recurrent": recurrent,
    }
    for name in POLICIES:
        found[f"hybrid, {name}"] = partial(hybrid, name)
    for name in STORAGES:
        found[f"hybrid, {name}"] = partial(hybrid, None, name)
    found |= {f"hybrid, {p}, {s}": partial(hybrid, p, s) for p, s in (("h2o", "8-bit"), ("quest", "4-bit"))}
    for name in FAMILIES:
        found[f"family {name}"] = partial(family, name)
    found |= {f"family {name}, defer": partial(family, name, fold="defer") for name in _DEFERRING if name in FAMILIES}
    return found


_BACK = frozenset(
    {
        "tokens taken back leave no trace",
        "a part of a chunk taken back leaves no trace",
        "a sequence can go back twice, and back and forth",
        "a checkpoint stays as it was, whatever its family does",
        "a saved sequence can go back",
        "a fork can go back, and its origin stays",
        "it says what it can",
        "anything, in any order",
    }
)
_WITHOUT_TREES = (
    *POLICIES, *STORAGES, "h2o, 8-bit", "quest, 4-bit",
    "indexed", "indexed, pages of one token", "indexed in spans", "indexed in spans, replay",
)  # fmt: skip
"""What a token sees there depends on more than the rows before it."""
_TREES = frozenset({"a path of a tree is as if it alone had been fed"})
REFUSED: dict[str, frozenset[str]] = {
    **{f"hybrid, {kind}": _TREES for kind in _WITHOUT_TREES},
    "hybrid, no rollback window": _BACK | _TREES,  # It can take back all tokens, but no part of them.
    "hybrid, small budget": frozenset({"anything, in any order"}),  # Eight sequences do not fit into this budget.
}
"""Maps a subject to the promises that it refuses, at least in part."""
_DEFERRING = ("gated_delta", "mamba1", "rwkv7", "ssd")
