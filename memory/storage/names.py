"""Holds the names of layer memories, pools, policies and storages in saved files, which never change.

If the code renames its classes, fields or pools, the table here maps the new names to those in files. So old files stay
readable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from hybridmem.memory.eviction import (
    H2O,
    TOVA,
    EvictionPolicy,
    ExpectedAttention,
    KNorm,
    PyramidKV,
    Quest,
    Recent,
    Scissorhands,
    SnapKV,
)
from hybridmem.memory.layer_memories import Held, LayerMemories, Snapshot
from hybridmem.memory.quantization import Float8, Quantized
from hybridmem.memory.specs import AttentionSpec, CrossAttentionSpec, IndexSpec, LayerSpec

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Named:
    """Holds the names in files of a policy's or a storage's class and of its parameters (field -> name in files)."""

    name: str
    parameters: dict[str, str]

    def values(self, choice: Any) -> dict[str, Any]:
        """Return the parameters of a policy or a storage: name in files -> value, in the order of `parameters`."""
        return {name: getattr(choice, field) for name, field in self.parameters.items()}


def _named(name: str, *parameters: str) -> Named:
    return Named(name, {parameter: parameter for parameter in parameters})


_ROWS = ("budget_tokens", "sinks", "recent", "every")

CHOICES: dict[type, Named] = {
    Recent: _named("Recent", *_ROWS),
    KNorm: _named("KNorm", *_ROWS),
    H2O: _named("H2O", *_ROWS, "decay"),
    Scissorhands: _named("Scissorhands", *_ROWS, "decay"),
    TOVA: _named("TOVA", *_ROWS),
    ExpectedAttention: _named("ExpectedAttention", *_ROWS, "decay"),
    SnapKV: _named("SnapKV", *_ROWS, "observed", "kernel"),
    PyramidKV: _named("PyramidKV", *_ROWS, "observed", "kernel", "steepness"),
    Quest: _named("Quest", "budget_tokens", "sinks", "recent", "select_up_to"),
    Quantized: _named("Quantized", "group", "bits"),
    Float8: _named("Float8", "group"),
}
"""The policies and storages of this library. Saved files hold the parameters in this order."""


def kind_in_files(memory: LayerSpec) -> str:
    """Return the name in files of a layer memory's kind."""
    if isinstance(memory, AttentionSpec):
        return "attention"
    if isinstance(memory, IndexSpec):
        return "index"
    return "cross-attention" if isinstance(memory, CrossAttentionSpec) else "recurrence"


def pools_in_files(memory: LayerSpec) -> tuple[str, ...]:
    """Return the names in files of a layer memory's pools, in the order of `LayerMemory.pools`."""
    if isinstance(memory, CrossAttentionSpec):
        return ("encoder pages",)
    if isinstance(memory, IndexSpec):
        return ("pages",)
    if not isinstance(memory, AttentionSpec) or isinstance(memory.policy, EvictionPolicy):
        return ("states", "tails")
    return ("pages",) if memory.storage is None else ("exact pages", "pages")


@dataclass(frozen=True)
class Names:
    """Maps names of layer memories and of pools to other names.

    Attributes:
        records: old name -> new name of layer memories, each of which has one record.
        pools: old name -> new name of pools.
    """

    records: dict[str, str]
    pools: dict[str, str]

    def renamed(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot under the new names. Names that are not in the table stay."""
        return Snapshot(_renamed(snapshot.records, self.records), self.of_pools(snapshot.blocks))

    def renamed_held(self, held: Held) -> Held:
        """Return what a slot holds under the new names, as `renamed` does for snapshots."""
        return Held(_renamed(held.records, self.records), self.of_pools(held.numbers))

    def of_pools(self, values: dict[str, ValueT]) -> dict[str, ValueT]:
        """Return the same values under the new names of their pools."""
        return _renamed(values, self.pools)

    @property
    def reversed(self) -> Names:
        """Return the table that maps the new names back to the old ones."""
        return Names({new: old for old, new in self.records.items()}, {new: old for old, new in self.pools.items()})


def _renamed(values: dict[str, ValueT], table: dict[str, str]) -> dict[str, ValueT]:
    return {table.get(name, name): value for name, value in values.items()}


def names_in_files(layers: LayerMemories) -> Names:
    """Return the table from a memory's own names of layer memories and pools to the names in files.

    The name of a layer memory is KIND LAYER NAME of the first attention or recurrence that it serves, such as
    "attention 3 attention". The name of a pool is the name of its layer memory, a slash, and its name by
    `pools_in_files`.
    """
    names = Names({}, {})
    for own, memory in layers.items():
        layer, spec = layers.members[own][0]
        names.records[own] = f"{kind_in_files(spec)} {layer} {spec.name}"
        for (pool, _), name in zip(memory.pools, pools_in_files(spec), strict=True):
            names.pools[pool.name] = f"{names.records[own]}/{name}"
    return names
