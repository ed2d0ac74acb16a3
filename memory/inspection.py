"""Where the bytes are: what `HybridMemory.usage()` returns, and how a memory shows itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

import numpy as np

from memory.arena import Arena, BlockPool
from memory.interface import Int64s, Sequence


@dataclass(frozen=True)
class SequenceUsage:
    """Bytes that one sequence refers to. What others refer to as well is in `by_kind` and again in `shared_bytes`."""

    id: int
    n_tokens: int
    is_checkpoint: bool
    by_kind: dict[str, int]
    shared_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.by_kind.values())

    @property
    def private_bytes(self) -> int:
        """What closing the sequence would give back."""
        return self.total_bytes - self.shared_bytes


@dataclass(frozen=True)
class Usage:
    """Bytes of a memory, counted in the arena. by_kind's values sum to `used_bytes`; each block counts once there.

    Attributes:
        budget_bytes: what the memory may use at most; used_bytes + free_bytes.
        by_kind: pages, states, tails.
        block_bytes: of one block of each kind.
        padding_bytes: part of `used_bytes` that alignment adds.
        by_sequence: open sequences and checkpoints by id.
        host_bytes, disk_bytes: what was swapped out holds outside of the budget.
    """

    budget_bytes: int
    used_bytes: int
    free_bytes: int
    padding_bytes: int
    by_kind: dict[str, int]
    block_bytes: dict[str, int]
    by_sequence: dict[int, SequenceUsage]
    host_bytes: int
    disk_bytes: int

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {format_bytes(n)}" for name, n in self.by_kind.items())
        places = ((self.host_bytes, "host memory"), (self.disk_bytes, "files"))
        away = "".join(f", {format_bytes(n)} swapped out to {place}" for n, place in places if n)
        return f"{format_bytes(self.used_bytes)} of {format_bytes(self.budget_bytes)} in {len(self.by_sequence)} sequences ({kinds}){away}"


def measure(
    arena: Arena, pools: Iterable[tuple[BlockPool, int]], sequences: Iterable[tuple[Sequence, int, dict[str, Int64s]]],
    swapped_bytes: tuple[int, int],
) -> Usage:  # fmt: skip
    """Count bytes.

    Args:
        pools: with the padding bytes of one block each.
        sequences: with their lengths and the blocks they refer to, by pool name.
        swapped_bytes: in host memory, and in files.
    """
    by_name = {pool.name: (pool, padding) for pool, padding in pools}
    by_sequence: dict[int, SequenceUsage] = {}
    for sequence, length, blocks in sequences:
        by_kind = {name: len(ids) * by_name[name][0].block_bytes for name, ids in blocks.items()}
        shared = sum(int((by_name[n][0].counts[ids] > 1).sum()) * by_name[n][0].block_bytes for n, ids in blocks.items())
        by_sequence[sequence.id] = SequenceUsage(sequence.id, length, sequence.is_checkpoint, by_kind, shared)
    return Usage(
        budget_bytes=arena.capacity_bytes,
        used_bytes=arena.used_bytes,
        free_bytes=arena.free_bytes,
        padding_bytes=sum(pool.n_used * padding for pool, padding in by_name.values()),
        by_kind={name: pool.used_bytes for name, (pool, _) in by_name.items()},
        block_bytes={name: pool.block_bytes for name, (pool, _) in by_name.items()},
        by_sequence=by_sequence,
        host_bytes=swapped_bytes[0],
        disk_bytes=swapped_bytes[1],
    )


def format_bytes(n_bytes: float) -> str:
    """'1.5 MiB': three significant digits in the largest binary unit below."""
    step = int(min(np.log2(max(n_bytes, 1)) // 10, 4))
    number = n_bytes / 1024**step
    return f"{number:{'.0f' if number >= 999.5 else '.3g'}} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[step]}"


def usage_html(usage: Usage, title: str, *, most_rows: int = 50) -> str:
    """A table for notebooks: self-contained, every string escaped, at most `most_rows` sequences."""
    kinds = list(usage.by_kind)
    head = "".join(f"<th>{escape(name)}</th>" for name in ("sequence", "tokens", *kinds, "shared"))
    rows = []
    for s in list(usage.by_sequence.values())[:most_rows]:
        name = f"{'checkpoint' if s.is_checkpoint else 'sequence'} {s.id}"
        cells = (name, f"{s.n_tokens:,}", *(format_bytes(s.by_kind.get(k, 0)) for k in kinds), format_bytes(s.shared_bytes))
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    more = len(usage.by_sequence) - len(rows)
    note = f"<p>… and {more:,} more</p>" if more > 0 else ""
    return f"<b>{escape(title)}</b><p>{escape(str(usage))}</p><table><tr>{head}</tr>{''.join(rows)}</table>{note}"
