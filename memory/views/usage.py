"""Counts the bytes of a memory by use and by sequence, for `HybridMemory.usage()` and for views in notebooks."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridmem.memory.blocks.arena import Arena
from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.holdings import Holding
from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.interface import LayerMemory, Sequence
from hybridmem.memory.specs import LayerSpec
from hybridmem.memory.views.text_tables import Table, as_html, as_rich, count, format_bytes

if TYPE_CHECKING:
    from rich.console import Group as RichGroup

Booleans = NDArray[np.bool_]

PARTS = ("body", "tail", "head", "checkpoints", "steps")
_MOST_ROWS = {"text": 20, "html": 50}


class Place(NamedTuple):
    """Identifies one use of bytes: by which layer memory, in which pool, as which part of a sequence.

    group, kind: names of a layer memory ("attention", "recurrence" ...) and of a pool ("pages", "states", "tails" ...).
    part: "body", "tail" or "head". The usage of a whole memory has two more parts: "checkpoints" are blocks to which
    only checkpoints refer, and "steps" are blocks that open steps have allocated.
    """

    group: str
    kind: str
    part: str


@dataclass(frozen=True)
class Group:
    """Describes one layer memory: its layers, its pools, and the blocks that sequences hold in them.

    Attributes:
        members: (layer, spec) of each attention or recurrence that it serves.
        pools: its pools, each with the layout of its blocks.
        holdings: the blocks that the inventory's sequences hold.
    """

    name: str
    members: list[tuple[int, LayerSpec]]
    pools: list[tuple[BlockPool, BlockLayout]]
    holdings: list[Holding]

    @property
    def shares(self) -> dict[str, tuple[int, ...]]:
        """Return, for each pool, how many bytes each member has in a block of the pool."""
        return {pool.name: layout.shares for pool, layout in self.pools}


class Layers(Protocol):
    """Declares what an inventory reads of all layer memories. `memory.layer_memories.LayerMemories` has more."""

    members: dict[str, list[tuple[int, LayerSpec]]]

    def items(self) -> ItemsView[str, LayerMemory[Any]]: ...


@dataclass(frozen=True)
class Inventory:
    """Lists all blocks and the sequences that refer to them. It is a view, valid until the memory changes.

    Attributes:
        sequences, lengths, away_bytes: (S,) open sequences and checkpoints, how many tokens each has, and how many
            bytes of each are swapped out.
    """

    arena: Arena
    sequences: list[Sequence]
    lengths: Int64s
    away_bytes: Int64s
    groups: list[Group]

    @staticmethod
    def of(
        arena: Arena, sequences: list[Sequence], lengths: Int64s, away_bytes: Int64s, layers: Layers, slots: Int64s
    ) -> Inventory:
        """Make the inventory of sequences in slots (S,)."""
        groups = [Group(name, layers.members[name], m.pools, m.holdings(slots)) for name, m in layers.items()]
        return Inventory(arena, sequences, lengths, away_bytes, groups)

    def frozen(self) -> Inventory:
        """Return a copy that stays valid while the memory changes. Cost: O(blocks), with two numbers for each block."""
        groups = [
            replace(group, pools=[(pool.frozen(), layout) for pool, layout in group.pools]) for group in self.groups
        ]
        return replace(self, arena=copy(self.arena), groups=groups)


class _Held:
    """Sums bytes by one field of their `Place`."""

    held: Mapping[Place, int]

    @property
    def by_kind(self) -> dict[str, int]:
        """Return bytes by pool: pages, states, tails ..."""
        return self._sums(1)

    @property
    def by_group(self) -> dict[str, int]:
        """Return bytes by layer memory: attention, recurrence ..."""
        return self._sums(0)

    @property
    def by_part(self) -> dict[str, int]:
        """Return bytes by part: body, tail, head ..."""
        return self._sums(2)

    def _sums(self, field: int) -> dict[str, int]:
        sums: dict[str, int] = {}
        for place, n_bytes in self.held.items():
            sums[place[field]] = sums.get(place[field], 0) + n_bytes
        return sums


@dataclass(frozen=True)
class SequenceUsage(_Held):
    """Counts the bytes of the blocks to which one sequence or checkpoint refers.

    Attributes:
        held: bytes by place, shared ones included.
        shared_bytes: how many of these bytes other sequences refer to as well.
        swapped_bytes: the sequence's bytes outside of the budget, if it is swapped out.
    """

    id: int
    n_tokens: int
    is_checkpoint: bool
    held: dict[Place, int]
    shared_bytes: int
    swapped_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.held.values())

    @property
    def private_bytes(self) -> int:
        """Return the bytes that closing the sequence would free."""
        return self.total_bytes - self.shared_bytes


@dataclass(frozen=True, eq=False)
class BySequence(Mapping[int, SequenceUsage]):
    """Maps the ids of S sequences to their usage. A usage is made when it is read, because few of thousands are read.

    Attributes:
        index: id -> the row in the arrays, which are (S,) or (S, P).
        held_SP, shared, swapped: arrays of bytes.
    """

    index: dict[int, int]
    lengths: Int64s
    is_checkpoint: Booleans
    places: list[Place]
    held_SP: Int64s
    shared: Int64s
    swapped: Int64s

    def __getitem__(self, id: int) -> SequenceUsage:
        i = self.index[id]
        held = dict(zip(self.places, self.held_SP[i].tolist(), strict=True))
        n_tokens, shared, swapped = int(self.lengths[i]), int(self.shared[i]), int(self.swapped[i])
        return SequenceUsage(id, n_tokens, bool(self.is_checkpoint[i]), held, shared, swapped)

    def __iter__(self) -> Iterator[int]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def counted(self) -> str:
        """Return the number of sequences and checkpoints in words: "2 sequences and 1 checkpoint"."""
        n_checkpoints = int(self.is_checkpoint.sum())
        sequences = count(len(self) - n_checkpoints, "sequence", "sequences")
        return f"{sequences} and {count(n_checkpoints, 'checkpoint', 'checkpoints')}" if n_checkpoints else sequences


@dataclass(frozen=True, repr=False)
class Usage(_Held):
    """Counts the bytes of a memory.

    Each block counts once in `held`, even if it is shared, so `held` sums to `used_bytes`.

    Attributes:
        budget_bytes: the most bytes that the memory may use, which are used_bytes + free_bytes.
        held: bytes by place. A block that is different parts of different sequences counts as the first of body, tail,
            head. Without a policy or storage, all pages of attention count as body, because rows stay in their pages
            when they leave the tail. With an eviction policy or a storage, rows move when they fold, so there are
            tails.
        shared, block_bytes: pool -> the bytes of blocks to which several sequences refer, and the bytes of one block.
        padding_bytes: how many of the `used_bytes` are added by alignment.
        layers: name of a layer memory -> the layers that it serves.
        by_sequence: id of an open sequence or checkpoint -> its usage.
        host_bytes, disk_bytes: bytes of swapped-out sequences in host memory, and in files.
        on_host: the usage of pages in host memory and of their sequences. None without `host_pages`.
        token_bytes, book_bytes: bytes of host memory for token ids, and for the tables that say where blocks are and
            what refers to them.
    """

    budget_bytes: int
    used_bytes: int
    free_bytes: int
    padding_bytes: int
    held: dict[Place, int]
    shared: dict[str, int]
    block_bytes: dict[str, int]
    layers: dict[str, tuple[int, ...]]
    by_sequence: BySequence
    host_bytes: int
    disk_bytes: int
    on_host: Usage | None = None
    token_bytes: int = 0
    book_bytes: int = 0

    @property
    def host(self) -> dict[str, int]:
        """Return, for each use, the bytes of host memory that the memory takes in addition to its budget."""
        pages = {} if self.on_host is None else {"offloaded pages": self.on_host.used_bytes}
        return {"swapped out": self.host_bytes, **pages, "tokens": self.token_bytes, "books": self.book_bytes}

    @property
    def shared_bytes(self) -> int:
        return sum(self.shared.values())

    @property
    def private_bytes(self) -> int:
        return self.used_bytes - self.shared_bytes

    @property
    def summary(self) -> str:
        """Return the most important numbers in one line."""
        kinds = ", ".join(f"{name} {format_bytes(n)}" for name, n in self.by_kind.items())
        places = ((self.host_bytes, "host memory"), (self.disk_bytes, "files"))
        swapped = "".join(f", {format_bytes(n)} swapped out to {place}" for n, place in places if n)
        used, budget = format_bytes(self.used_bytes), format_bytes(self.budget_bytes)
        on_host = f"; in host memory {self.on_host.summary}" if self.on_host is not None else ""
        return f"{used} of {budget} in {self.by_sequence.counted} ({kinds}){swapped}{on_host}"

    def __str__(self) -> str:
        return "\n\n".join([self.summary, *map(str, self.tables("text"))])

    def __repr__(self) -> str:
        return f"<Usage: {self.summary}>"

    def __rich__(self) -> RichGroup:
        return as_rich(self.summary, self.tables("text"))

    def _repr_html_(self) -> str:
        return self.html("Usage")

    def html(self, title: str) -> str:
        """Return the summary, a bar and the tables as HTML."""
        return as_html(title, [self.summary], self.by_part, self.budget_bytes, self.tables("html"))

    def tables(self, medium: str) -> list[Table]:
        """Return tables of bytes by pool and by sequence, first of the budget, then of host memory.

        `medium`: "text" or "html".
        """
        most, on_host = _MOST_ROWS[medium], self.on_host
        own = [*([self._places("kind")] if self.held else []), *self._sequences(most, "sequence")]
        if on_host is None or not on_host.by_sequence:
            return own
        return [*own, on_host._places("in host memory"), *on_host._sequences(most, "in host memory")]

    def _places(self, title: str) -> Table:
        by_part = self.by_part
        parts = [part for part in PARTS if part in ("body", "tail") or by_part[part]]
        rows = []
        for group, kind in dict.fromkeys((p.group, p.kind) for p in self.held):
            sizes = [self.held[Place(group, kind, part)] for part in parts]
            numbers = (*sizes, sum(sizes), self.shared[kind], self.block_bytes[kind])
            rows.append((use_name(group, kind, len(self.layers[group])), *map(byte_cell, numbers)))
        totals = (*(by_part[part] for part in parts), self.used_bytes, self.shared_bytes)
        return Table((title, *parts, "total", "shared", "a block"), [*rows, ("all", *map(byte_cell, totals), "")])

    def _sequences(self, most: int, title: str) -> Iterable[Table]:
        if not self.by_sequence:
            return
        shown = list(islice(self.by_sequence.values(), most))
        parts = [part for part in ("body", "tail", "head") if any(s.by_part.get(part) for s in shown)]
        has_swapped = any(s.swapped_bytes for s in shown)
        rows = []
        for s in shown:
            name = f"{'checkpoint' if s.is_checkpoint else 'sequence'} {s.id}"
            sizes = [s.by_part[part] for part in parts] + [s.total_bytes, s.shared_bytes, s.private_bytes]
            sizes += [s.swapped_bytes] * has_swapped
            rows.append((name, f"{s.n_tokens:,}", *map(byte_cell, sizes)))
        columns = (title, "tokens", *parts, "total", "shared", "private", *["swapped out"] * has_swapped)
        yield Table(columns, rows, len(self.by_sequence) - len(shown))


def use_name(group: str, kind: str, n_layers: int) -> str:
    """Return the title of a row: "attention: pages, 4 layers".

    If the pool's name contains the group's name, the title has only the pool's name.
    """
    return f"{kind if group in kind else f'{group}: {kind}'}, {count(n_layers, 'layer', 'layers')}"


def byte_cell(n_bytes: int) -> str:
    return format_bytes(n_bytes) if n_bytes else "–"


def measure(
    inventory: Inventory, swapped_bytes: tuple[int, int], host_inventory: Inventory | None = None, token_bytes: int = 0
) -> Usage:
    """Count the bytes of all blocks, by place and by sequence.

    Args:
        inventory, host_inventory: the inventory of all sequences, and the inventory of those whose pages are in host
            memory.
        swapped_bytes: bytes of swapped-out sequences in host memory, and in files.
        token_bytes: bytes of all token ids.
    Cost: O(blocks in use).
    """
    sequences, arena = inventory.sequences, inventory.arena
    is_checkpoint = np.array([s.is_checkpoint for s in sequences], np.bool_)
    held: dict[Place, int] = {}
    shared: dict[str, int] = {}
    columns: dict[Place, Int64s] = {}
    shared_S = np.zeros(len(sequences), np.int64)
    for group in inventory.groups:
        for pool, _ in group.pools:
            holdings = [h for h in group.holdings if h.pool == pool.name]
            for holding in holdings:
                place, several = Place(group.name, pool.name, holding.part), pool.counts[holding.ids] > 1
                columns[place] = columns.get(place, 0) + holding.counts * pool.block_bytes
                owners = np.repeat(np.arange(len(sequences)), holding.counts)
                shared_S += np.bincount(owners[several], minlength=len(sequences)) * pool.block_bytes
            n_blocks = _by_part(pool, holdings, is_checkpoint)
            held |= {Place(group.name, pool.name, part): n * pool.block_bytes for part, n in n_blocks.items()}
            shared[pool.name] = int((pool.counts > 1).sum()) * pool.block_bytes
    held_SP = np.array(list(columns.values()), np.int64).reshape(len(columns), len(sequences)).T
    index = {s.id: i for i, s in enumerate(sequences)}
    lengths, swapped_S = inventory.lengths, inventory.away_bytes
    by_sequence = BySequence(index, lengths, is_checkpoint, list(columns), held_SP, shared_S, swapped_S)
    pools = [entry for group in inventory.groups for entry in group.pools]
    return Usage(
        budget_bytes=arena.capacity_bytes,
        used_bytes=arena.used_bytes,
        free_bytes=arena.free_bytes,
        padding_bytes=sum(pool.n_used * layout.padding_bytes for pool, layout in pools),
        held=held,
        shared=shared,
        block_bytes={pool.name: pool.block_bytes for pool, _ in pools},
        layers={group.name: tuple(dict.fromkeys(layer for layer, _ in group.members)) for group in inventory.groups},
        by_sequence=by_sequence,
        host_bytes=swapped_bytes[0],
        disk_bytes=swapped_bytes[1],
        on_host=None if host_inventory is None else measure(host_inventory, (0, 0)),
        token_bytes=token_bytes,
        book_bytes=sum(pool.book_bytes for pool, _ in pools),
    )


def _by_part(pool: BlockPool, holdings: list[Holding], is_checkpoint: Booleans) -> dict[str, int]:
    """Count a pool's blocks in use by part. A block with several parts counts as the first of `PARTS`."""
    ranks = np.full(len(pool.counts), PARTS.index("steps"))
    checkpoints = PARTS.index("checkpoints")
    for holding in holdings:
        own = np.where(np.repeat(is_checkpoint, holding.counts), checkpoints, PARTS.index(holding.part))
        np.minimum.at(ranks, holding.ids, own)
    return dict(zip(PARTS, np.bincount(ranks[pool.counts > 0], minlength=len(PARTS)).tolist(), strict=True))
