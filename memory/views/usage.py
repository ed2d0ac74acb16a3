"""Where the bytes are: what `HybridMemory.usage()` returns, and how memories and sequences show themselves."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from memory.blocks.arena import Arena
from memory.blocks.arrays import EMPTY, Int64s
from memory.blocks.holdings import Holding
from memory.blocks.layout import BlockLayout
from memory.blocks.pool import BlockPool
from memory.interface import LayerMemory, Sequence
from memory.specs import LayerSpec
from memory.views.text_tables import Table, as_html, as_rich, count, format_bytes

if TYPE_CHECKING:
    from rich.console import Group as RichGroup

Booleans = NDArray[np.bool_]

_PARTS = ("body", "tail", "head", "checkpoints", "steps")
_MOST_ROWS = {"text": 20, "html": 50}
_MOST_MARKS = 8


class Place(NamedTuple):
    """Where bytes are.

    group: the layers that share blocks: "attention", "recurrence" ...
    kind: of block: "pages", "states", "tails" ...
    part: "body", "tail" or "head", which are states that only save work. Of a whole memory also "checkpoints", what no
        live sequence refers to, and "steps", what open steps have set aside.
    """

    group: str
    kind: str
    part: str


@dataclass(frozen=True)
class Group:
    """Layers that share blocks, and who holds these.

    Attributes:
        members: (layer, spec) of each of its memories.
        pools: each with how its blocks are laid out.
        holdings: of the inventory's sequences.
    """

    name: str
    members: list[tuple[int, LayerSpec]]
    pools: list[tuple[BlockPool, BlockLayout]]
    holdings: list[Holding]

    @property
    def shares(self) -> dict[str, tuple[int, ...]]:
        """Return pool -> bytes of a block that each member has."""
        return {pool.name: layout.shares for pool, layout in self.pools}


class Layers(Protocol):
    """What is looked at of the layer memories of a model: `memory.layer_memories.LayerMemories`."""

    members: dict[str, list[tuple[int, LayerSpec]]]

    def items(self) -> ItemsView[str, LayerMemory[Any]]: ...


@dataclass(frozen=True)
class Inventory:
    """Which blocks there are and who refers to them. It is a view, valid until the memory changes.

    Attributes:
        sequences: open sequences and checkpoints (S,), with their lengths, and the bytes of those swapped out.
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
        """Of sequences in slots (S,), layer memory by layer memory."""
        groups = [Group(name, layers.members[name], m.pools, m.holdings(slots)) for name, m in layers.items()]
        return Inventory(arena, sequences, lengths, away_bytes, groups)


class _Held:
    """Sums over bytes by place."""

    held: Mapping[Place, int]

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes by kind of block: pages, states, tails ..."""
        return self._sums(1)

    @property
    def by_group(self) -> dict[str, int]:
        """Bytes by the layers that share blocks."""
        return self._sums(0)

    @property
    def by_part(self) -> dict[str, int]:
        """Bytes by what they are to a sequence."""
        return self._sums(2)

    def _sums(self, field: int) -> dict[str, int]:
        sums: dict[str, int] = {}
        for place, n_bytes in self.held.items():
            sums[place[field]] = sums.get(place[field], 0) + n_bytes
        return sums


@dataclass(frozen=True)
class SequenceUsage(_Held):
    """Bytes that one sequence refers to. What others refer to as well is in `held` and again in `shared_bytes`.

    Attributes:
        held: bytes by place.
        swapped_bytes: that wait outside of the budget.
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
        """What closing the sequence would give back."""
        return self.total_bytes - self.shared_bytes


@dataclass(frozen=True, eq=False)
class BySequence(Mapping[int, SequenceUsage]):
    """Id -> usage, of S sequences at P places. Each is made when it is asked for: of thousands, few are.

    Attributes:
        index: id -> where it stands below, (S,) each.
        held_SP: bytes.
    """

    index: dict[int, int]
    lengths: Int64s
    is_mark: Booleans
    places: list[Place]
    held_SP: Int64s
    shared: Int64s
    swapped: Int64s

    def __getitem__(self, id: int) -> SequenceUsage:
        i = self.index[id]
        held = dict(zip(self.places, self.held_SP[i].tolist(), strict=True))
        return SequenceUsage(
            id, int(self.lengths[i]), bool(self.is_mark[i]), held, int(self.shared[i]), int(self.swapped[i])
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def counted(self) -> str:
        """How many there are: "2 sequences and 1 checkpoint"."""
        n_marks = int(self.is_mark.sum())
        sequences = count(len(self) - n_marks, "sequence", "sequences")
        return f"{sequences} and {count(n_marks, 'checkpoint', 'checkpoints')}" if n_marks else sequences


@dataclass(frozen=True, repr=False)
class Usage(_Held):
    """Bytes of a memory, counted in the arena. `held` sums to `used_bytes`; each block counts once there.

    Attributes:
        budget_bytes: what the memory may use at most; used_bytes + free_bytes.
        held: bytes by place. A block that is several things to several sequences counts as the first in body, tail,
            head. Rows of attention stay in their pages when they leave the tail, so all of its pages count as body;
            policies and storages move them, and have tails.
        shared: kind -> bytes of blocks that several refer to.
        block_bytes: of one block of each kind.
        padding_bytes: part of `used_bytes` that alignment adds.
        layers: group -> layers.
        by_sequence: open sequences and checkpoints by id.
        host_bytes, disk_bytes: what was swapped out holds outside of the budget.
        on_host: of pages in host memory, which have a budget of their own, and of the sequences whose pages are there;
            None without `host_pages`.
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

    @property
    def shared_bytes(self) -> int:
        return sum(self.shared.values())

    @property
    def private_bytes(self) -> int:
        return self.used_bytes - self.shared_bytes

    @property
    def summary(self) -> str:
        """One line."""
        kinds = ", ".join(f"{name} {format_bytes(n)}" for name, n in self.by_kind.items())
        places = ((self.host_bytes, "host memory"), (self.disk_bytes, "files"))
        away = "".join(f", {format_bytes(n)} swapped out to {place}" for n, place in places if n)
        used, budget = format_bytes(self.used_bytes), format_bytes(self.budget_bytes)
        hosted = f"; in host memory {self.on_host.summary}" if self.on_host is not None else ""
        return f"{used} of {budget} in {self.by_sequence.counted} ({kinds}){away}{hosted}"

    def __str__(self) -> str:
        return "\n\n".join([self.summary, *map(str, self.tables("text"))])

    def __repr__(self) -> str:
        return f"<Usage: {self.summary}>"

    def __rich__(self) -> RichGroup:
        return as_rich(self.summary, self.tables("text"))

    def _repr_html_(self) -> str:
        return self.html("Usage")

    def html(self, title: str) -> str:
        return as_html(title, [self.summary], self.by_part, self.budget_bytes, self.tables("html"))

    def tables(self, medium: str) -> list[Table]:
        """Where the bytes are, and whose they are; then the same of host memory."""
        own = [*([self._places("kind")] if self.held else []), *self._sequences(_MOST_ROWS[medium], "sequence")]
        if self.on_host is None or not self.on_host.by_sequence:
            return own
        return [
            *own,
            self.on_host._places("in host memory"),
            *self.on_host._sequences(_MOST_ROWS[medium], "in host memory"),
        ]

    def _places(self, title: str) -> Table:
        by_part = self.by_part
        parts = [part for part in _PARTS if part in ("body", "tail") or by_part[part]]
        rows = []
        for group, kind in dict.fromkeys((p.group, p.kind) for p in self.held):
            sizes = [self.held[Place(group, kind, part)] for part in parts]
            numbers = (*sizes, sum(sizes), self.shared[kind], self.block_bytes[kind])
            rows.append((_name(group, kind, len(self.layers[group])), *map(_cell, numbers)))
        totals = (*(by_part[part] for part in parts), self.used_bytes, self.shared_bytes)
        return Table((title, *parts, "total", "shared", "a block"), [*rows, ("all", *map(_cell, totals), "")])

    def _sequences(self, most: int, title: str) -> Iterable[Table]:
        if not self.by_sequence:
            return
        shown = list(islice(self.by_sequence.values(), most))
        parts = [part for part in ("body", "tail", "head") if any(s.by_part.get(part) for s in shown)]
        is_away = any(s.swapped_bytes for s in shown)
        rows = []
        for s in shown:
            name = f"{'checkpoint' if s.is_checkpoint else 'sequence'} {s.id}"
            by_part = s.by_part
            sizes = (
                *(by_part[part] for part in parts),
                s.total_bytes,
                s.shared_bytes,
                s.private_bytes,
                *[s.swapped_bytes] * is_away,
            )
            rows.append((name, f"{s.n_tokens:,}", *map(_cell, sizes)))
        columns = (title, "tokens", *parts, "total", "shared", "private", *["swapped out"] * is_away)
        yield Table(columns, rows, len(self.by_sequence) - len(shown))


def _name(group: str, kind: str, n_layers: int) -> str:
    """'attention: pages, 4 layers'; names of kinds that tell of their layers already stand alone."""
    return f"{kind if group in kind else f'{group}: {kind}'}, {count(n_layers, 'layer', 'layers')}"


def _cell(n_bytes: int) -> str:
    return format_bytes(n_bytes) if n_bytes else "–"


def measure(inventory: Inventory, swapped_bytes: tuple[int, int], host_inventory: Inventory | None = None) -> Usage:
    """Count bytes.

    Args:
        inventory: of all sequences.
        swapped_bytes: in host memory, and in files.
        host_inventory: of all sequences whose pages are in host memory.
    Cost: O(blocks in use).
    """
    sequences, arena = inventory.sequences, inventory.arena
    is_mark = np.array([s.is_checkpoint for s in sequences], np.bool_)
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
            n_blocks = _by_part(pool, holdings, is_mark)
            held |= {Place(group.name, pool.name, part): n * pool.block_bytes for part, n in n_blocks.items()}
            shared[pool.name] = int((pool.counts > 1).sum()) * pool.block_bytes
    held_SP = np.array(list(columns.values()), np.int64).reshape(len(columns), len(sequences)).T
    index = {s.id: i for i, s in enumerate(sequences)}
    by_sequence = BySequence(index, inventory.lengths, is_mark, list(columns), held_SP, shared_S, inventory.away_bytes)
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
    )


def _by_part(pool: BlockPool, holdings: list[Holding], is_mark: Booleans) -> dict[str, int]:
    """Blocks in use by part, each once: as the first of `_PARTS` that it is to anybody."""
    ranks = np.full(len(pool.counts), _PARTS.index("steps"))
    for part in ("checkpoints", "head", "tail", "body"):
        for holding in holdings:
            is_marks = np.repeat(is_mark, holding.counts)
            if part == "checkpoints":
                ranks[holding.ids[is_marks]] = _PARTS.index(part)
            elif part == holding.part:
                ranks[holding.ids[~is_marks]] = _PARTS.index(part)
    return dict(zip(_PARTS, np.bincount(ranks[pool.counts > 0], minlength=len(_PARTS)).tolist(), strict=True))


def sequence_html(inventory: Inventory, marks: list[Sequence], host_inventory: Inventory | None = None) -> str:
    """An open sequence for notebooks.

    Args:
        inventory: of it alone; host_inventory: of what it has in host memory.
        marks: checkpoints of its family.
    """
    (sequence,) = inventory.sequences
    usage = measure(inventory, (0, 0)).by_sequence[sequence.id]
    parts = [part for part in ("body", "tail", "head") if part != "head" or usage.by_part.get(part)]
    tables, facts = (
        [_blocks("kind", inventory, usage, parts)] if inventory.groups else [],
        list(_facts(sequence, usage, marks)),
    )
    if host_inventory is not None and host_inventory.sequences:
        there = measure(host_inventory, (0, 0)).by_sequence[sequence.id]
        tables.append(_blocks("in host memory", host_inventory, there, parts))
        facts.append(f"in host memory {format_bytes(there.total_bytes)}: keys and values")
    title = f"{'Checkpoint' if sequence.is_checkpoint else 'Sequence'} {sequence.id}"
    bar = {part: usage.by_part.get(part, 0) for part in _PARTS}
    return as_html(title, facts, bar, max(1, usage.total_bytes), tables)


def _blocks(title: str, inventory: Inventory, usage: SequenceUsage, parts: list[str]) -> Table:
    """Of one sequence, kind by kind."""
    rows = []
    for group in inventory.groups:
        n_layers = len({layer for layer, _ in group.members})
        for pool, _ in group.pools:
            sizes = [usage.held.get(Place(group.name, pool.name, part), 0) for part in parts]
            ids = np.concatenate([EMPTY, *(h.ids for h in group.holdings if h.pool == pool.name)])
            shared = int((pool.counts[ids] > 1).sum()) * pool.block_bytes
            rows.append((_name(group.name, pool.name, n_layers), *map(_cell, (*sizes, sum(sizes), shared))))
    return Table((title, *parts, "total", "shared"), rows)


def _facts(sequence: Sequence, usage: SequenceUsage, marks: list[Sequence]) -> Iterator[str]:
    length, horizon = usage.n_tokens, sequence.horizon
    yield f"{count(length, 'token', 'tokens')}, horizon {horizon:,}"
    if not sequence.is_checkpoint:
        others = [f"to checkpoint {mark.id} at {mark.length:,}" for mark in marks[:_MOST_MARKS]]
        more = [f"to {len(marks) - _MOST_MARKS:,} more checkpoints"] * (len(marks) > _MOST_MARKS)
        reach = ", ".join([f"to {horizon:,} … {length:,}", *["to 0"] * (horizon > 0), *others, *more])
        yield f"{'once it is back, it ' if sequence.is_swapped else ''}can roll back {reach}"
    if sequence.is_swapped:
        yield f"swapped out: {format_bytes(usage.swapped_bytes)} wait outside of the budget"
    else:
        total, shared, private = map(format_bytes, (usage.total_bytes, usage.shared_bytes, usage.private_bytes))
        yield f"{total}: {shared} shared with others, {private} private"
