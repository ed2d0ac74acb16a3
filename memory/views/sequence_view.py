"""Shows one sequence or checkpoint in a notebook: its bytes, and the positions to which it can roll back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hybridmem.memory.blocks.arrays import EMPTY
from hybridmem.memory.interface import Sequence
from hybridmem.memory.views.text_tables import Table, as_html, count, format_bytes
from hybridmem.memory.views.usage import PARTS, Inventory, Place, SequenceUsage, byte_cell, measure, use_name

_MOST_CHECKPOINTS = 8


def sequence_html(inventory: Inventory, checkpoints: list[Sequence], host_inventory: Inventory | None = None) -> str:
    """Return a view of one open sequence for notebooks.

    Args:
        inventory, host_inventory: inventories of this sequence alone, on the device and in host memory.
        checkpoints: the checkpoints to which it can roll back.
    """
    (sequence,) = inventory.sequences
    usage = measure(inventory, (0, 0)).by_sequence[sequence.id]
    parts = [part for part in ("body", "tail", "head") if part != "head" or usage.by_part.get(part)]
    tables = [_blocks("kind", inventory, usage, parts)] if inventory.groups else []
    facts = list(_facts(sequence, usage, checkpoints))
    if host_inventory is not None and host_inventory.sequences:
        on_host = measure(host_inventory, (0, 0)).by_sequence[sequence.id]
        tables.append(_blocks("in host memory", host_inventory, on_host, parts))
        facts.append(f"in host memory {format_bytes(on_host.total_bytes)}: keys and values")
    title = f"{'Checkpoint' if sequence.is_checkpoint else 'Sequence'} {sequence.id}"
    bar = {part: usage.by_part.get(part, 0) for part in PARTS}
    return as_html(title, facts, bar, max(1, usage.total_bytes), tables)


def _blocks(title: str, inventory: Inventory, usage: SequenceUsage, parts: list[str]) -> Table:
    """Return a table of one sequence's bytes, pool by pool."""
    rows = []
    for group in inventory.groups:
        n_layers = len({layer for layer, _ in group.members})
        for pool, _ in group.pools:
            sizes = [usage.held.get(Place(group.name, pool.name, part), 0) for part in parts]
            ids = np.concatenate([EMPTY, *(h.ids for h in group.holdings if h.pool == pool.name)])
            shared = int((pool.counts[ids] > 1).sum()) * pool.block_bytes
            rows.append((use_name(group.name, pool.name, n_layers), *map(byte_cell, (*sizes, sum(sizes), shared))))
    return Table((title, *parts, "total", "shared"), rows)


def _facts(sequence: Sequence, usage: SequenceUsage, checkpoints: list[Sequence]) -> Iterator[str]:
    """Generate lines of text: length and horizon, the positions that a rollback reaches, and bytes."""
    length, horizon = usage.n_tokens, sequence.horizon
    yield f"{count(length, 'token', 'tokens')}, horizon {horizon:,}"
    if not sequence.is_checkpoint:
        others = [f"to checkpoint {c.id} at {c.length:,}" for c in checkpoints[:_MOST_CHECKPOINTS]]
        more = [f"to {n:,} more checkpoints" for n in [len(checkpoints) - _MOST_CHECKPOINTS] if n > 0]
        reach = ", ".join([f"to {horizon:,} … {length:,}", *["to 0"] * (horizon > 0), *others, *more])
        yield f"{'once it is back, it ' if sequence.is_swapped else ''}can roll back {reach}"
    if sequence.is_swapped:
        yield f"swapped out: {format_bytes(usage.swapped_bytes)} wait outside of the budget"
    else:
        total, shared, private = map(format_bytes, (usage.total_bytes, usage.shared_bytes, usage.private_bytes))
        yield f"{total}: {shared} shared with others, {private} private"
