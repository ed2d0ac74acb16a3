"""Looks inside a memory. No other place of the tests reads what no public name of the library says.

Promises about bytes, positions and references are tested through `usage()`, `counters`, `check()`, handles and outputs.
Here is the rest. Some functions return raw bytes, to poison them or to read stored rows. Others return layer memories,
to let one fail in the middle of a step, or columns of the books, to spoil one and see that `check()` finds it. One
computes the checksum of files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from hybridmem.memory import HybridMemory, Sequence
from hybridmem.memory.blocks.arena import Arena
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.sequences.ledger import Ledger
from hybridmem.memory.storage import family_files
from hybridmem.memory.storage.checksums import checksum_of
from hybridmem.memory.storage.family_files import SavedFamily
from hybridmem.memory.storage.files import BLOCKS, CHECKSUM


def forged_file(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Return a file of a saved sequence, or of blocks, that says anything, with checksums that are right.

    Members whose entries cannot be read keep the checksums that they have.
    """
    metadata = {name: text for name, text in metadata.items() if name != CHECKSUM}
    if "members" not in metadata:
        return save(tensors, metadata | {CHECKSUM: checksum_of(tensors, metadata)})
    with suppress(KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError, RuntimeError):
        entries = json.loads(metadata["members"])
        members = [family_files._read_entry(entry, 1 << 40) for entry in entries]
        tokens = [tensors[f"tokens/{i}"].numpy() for i in range(1 + max(member.buffer for member in members))]
        blocks = {name.removeprefix(BLOCKS): [own] for name, own in tensors.items() if name.startswith(BLOCKS)}
        for entry, own in zip(
            entries, family_files._checksums(SavedFamily("", {}, members, tokens, blocks)), strict=True
        ):
            entry[CHECKSUM] = own
        metadata["members"] = json.dumps(entries)
    return save(tensors, metadata | {CHECKSUM: checksum_of({}, metadata)})


def store_of(memory: HybridMemory) -> Store:
    """Return what holds the bytes of the budget."""
    return memory._coordinator.store


def arena_bytes(memory: HybridMemory) -> Tensor:
    """Return all bytes of the budget, uint8, to be read or overwritten."""
    return store_of(memory)._bytes


def host_bytes(memory: HybridMemory) -> Tensor:
    """Return all bytes of offloaded pages, uint8, of a memory that has `host_pages`."""
    pages: Any = memory._coordinator.host_pages
    return pages._host_store._bytes


def host_arena(memory: HybridMemory) -> Arena:
    """Return what gives out the bytes of offloaded pages, of a memory that has `host_pages`."""
    pages: Any = memory._coordinator.host_pages
    arena: Arena = pages._host_store.arena
    return arena


def ledger_of(memory: HybridMemory) -> Ledger:
    """Return the record of positions, tokens and drops."""
    return memory._coordinator.ledger


def held_bytes(memory: HybridMemory, sequences: Iterable[Sequence]) -> int:
    """Return the bytes of the budget that these sequences hold together."""
    return memory._coordinator.layers.held_bytes(*(sequence.slot for sequence in sequences))


def layer_memories(memory: HybridMemory) -> dict[str, Any]:
    """Return name -> layer memory."""
    return memory._coordinator.layers


def layer_memory_at(memory: HybridMemory, layer: int, kind: str, name: str | None = None) -> Any:
    """Return the layer memory that serves one "attention", "cross-attention" or "recurrence" of a layer."""
    return memory._coordinator.places[layer, kind, name].memory


def kept_positions(memory: HybridMemory, sequence: Sequence) -> Tensor:
    """Return the positions of the rows that the only policy of a model, in one layer, has kept, (R, G) ascending."""
    (evicting,) = [layers for layers in layer_memories(memory).values() if hasattr(layers, "kept_positions")]
    kept: Tensor = evicting.kept_positions(sequence.slot, 0)
    return kept


def stored_keys(memory: HybridMemory, sequence: Sequence, attention: int) -> Tensor:
    """Return the keys that a model's attention of this number, without a window, has of a sequence, (T, G, D)."""
    own = memory.spec.of_kind("attention")[attention]
    group = next(group for group in memory.counters.inventory(sequence).groups if own in group.members)
    ((pool, layout),), (holding,) = group.pools, group.holdings
    n_before = sum(spec.n_parts for _, spec in group.members[: group.members.index(own)])  # type: ignore[union-attr]
    field = layout.fields[n_before]
    flat, starts = store_of(memory).flat(field), pool.addresses[holding.ids] // field.dtype.itemsize
    pages_NGPD = torch.stack([flat[start : start + field.n_elements].view(field.shape) for start in starts.tolist()])
    return pages_NGPD.transpose(1, 2).flatten(0, 1)[: sequence.length]


def token_bytes(memory: HybridMemory) -> int:
    """Return the bytes of all token ids that a memory holds: they are outside of its budget."""
    return memory.counters.token_bytes


def lock_of(memory: HybridMemory) -> Any:
    """Return the lock that a thread holds while it reads or writes the books."""
    return memory._coordinator.lock


def peak_of(memory: HybridMemory, sequence: Sequence) -> int:
    """Return the furthest position that a sequence has reached, from which the rollback window counts."""
    return int(memory._coordinator.ledger.peaks[sequence.slot])


def state_offset(memory: HybridMemory, sequence: Sequence) -> int:
    """Return how many dropped tokens the recurrent states of a sequence still contain."""
    states = layer_memories(memory).get("recurrence")
    return 0 if states is None else int(states.slots.offset[sequence.slot])


def prefix_roots(cache: PrefixCache) -> dict[Any, Any]:
    """Return owner -> root of the tree of a prefix cache."""
    return cache._kept.tree.roots


def outside_ascending(cache: PrefixCache) -> list[tuple[Sequence, int]]:
    """Return the checkpoints outside of the budget, with the bytes that closing each frees, as they give way."""
    return list(cache._kept.outside.ranking.ascending(0, cache.memory.counters.swaps.private_bytes_of))


def drops_of(memory: HybridMemory, sequence: Sequence) -> set[tuple[int, int]]:
    """Return (first position that it changed, its number) of each drop that a sequence remembers."""
    return set(memory._coordinator.ledger._seams.get(sequence.slot, ()))


def free_ranges(arena: Arena) -> tuple[dict[int, int], list[list[int]]]:
    """Return what finds an arena's free ranges: their starts by their ends, and the heaps of names."""
    return arena._starts, [*arena._heaps.values()]


def books(memory: HybridMemory) -> dict[str, Any]:
    """Return columns by slot, for tests of `check()` that spoil an entry: of the ledger, of pages and of states."""
    ledger, layers = memory._coordinator.ledger, layer_memories(memory)
    columns: dict[str, Any] = {
        "lengths": ledger.lengths, "buffers": ledger._buffers, "writable": ledger._writable, "seams": ledger._seams,
        "free slots": ledger._free_slots, "families": ledger._families, "peaks": ledger.peaks, "busy": ledger.is_busy,
        "away": ledger.is_away, "reserved": ledger._reserved,
    }  # fmt: skip
    caches = [x for x in layers.values() if hasattr(x, "_oldest")]
    if caches:
        columns |= {"oldest": caches[0]._oldest, "first page": caches[-1]._first_page}
    if "recurrence" in layers:
        slots = layers["recurrence"].slots
        columns |= {"offset": slots.offset, "floor": slots.floor, "states": slots.table}
    return columns


def shake(memory: HybridMemory) -> int:
    """Join all free ranges, of the budget and of `host_pages`, as far as no open step forbids it; return bytes moved.

    So every block that can move does, where an allocation that lacks room moves some.
    """
    for compactor in (compactors := memory._coordinator.room.compactors.values()):
        compactor.make_room(compactor.store.arena.free_bytes, at_any_cost=True)
    return sum(compactor.moved_bytes for compactor in compactors)


def assert_books_follow(cache: PrefixCache) -> None:
    """Assert that the tree and the rankings of a prefix cache are what its records give when they are computed anew."""
    kept: Any = cache._kept

    def books() -> Any:
        rankings = [
            {
                mark: (ranking._saved[i], ranking._held_bytes[i], ranking._used_at[i], ranking._priority[i])
                for mark, i in ranking._places.items()
            }
            for ranking in (kept._ranking, kept.outside.ranking)
        ]
        nodes = {mark: (node.depth, node.tokens.tolist(), node.mark is mark) for mark, node in kept.nodes.items()}
        ends = {mark for _, _, mark in kept._ends if mark in kept.records and kept.records[mark].seconds < math.inf}
        return sorted(cache.tree().splitlines()), nodes, kept.tree.n_tokens, rankings, ends

    found = books()
    kept._rebuild()
    assert found == books()
