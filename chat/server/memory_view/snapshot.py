"""Counts what the web page shows of a memory: bytes by kind, by sequence and by place, and the engine's work.

The numbers are those of `HybridMemory.usage()` and `memory.pictures`, so a page and a notebook agree. Data that must
not change during the count is copied first, under the lock of the memory's bookkeeping. Then it is counted, while steps
go on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.server.errors import ApiError
from hybridmem.memory import HybridMemory, Sequence
from hybridmem.memory.pictures import LayerRow, arena_of, layer_rows
from hybridmem.memory.views import PARTS, BySequence, Inventory, Place, Usage, measure

Chosen = int | Literal["newest"] | None
"""The sequence whose layers are described: a sequence by its id, the newest one, or none."""
MOST_SEQUENCES = 100
"""This many of the largest sequences are listed one by one. The others are summed up."""
_MOST_CHECKPOINTS = 500


@dataclass(frozen=True)
class Still:
    """Holds copies of all data that a snapshot counts, from one moment."""

    inventory: Inventory
    host_inventory: Inventory | None
    swapped_bytes: tuple[int, int]
    n_swapped_out: int
    token_bytes: int
    chosen: dict[str, Any] | None
    seconds: float


def take_still(engine: Engine, sequence_id: Chosen) -> Still:
    """Copy the data that a snapshot counts. Raises ApiError 404 if no sequence has this id.

    This waits for no step. A running step goes on; the snapshot shows the blocks that it has reserved. Only code that
    reads or writes the memory's bookkeeping waits, such as the beginning and the end of a step. Cost: O(blocks in use).
    """
    memory = engine.memory
    counters = memory.counters
    with counters.lock:
        started = time.perf_counter()
        chosen = _describe(memory, sequence_id)
        host = counters.host_inventory()
        return Still(
            counters.inventory().frozen(),
            None if host is None else host.frozen(),
            counters.swapped_bytes,
            len(counters.swaps),
            counters.token_bytes,
            chosen,
            time.perf_counter() - started,
        )


def snapshot(engine: Engine, model_id: str, sequence_id: Chosen = None) -> dict[str, Any]:
    """Return what the memory holds and what the engine does, as JSON. Any thread may call it.

    Args:
        sequence_id: the sequence or checkpoint whose layers are described as well.
    Raises:
        ApiError: 404 if there is no such sequence.
    Cost: O(blocks in use). 10,000 sequences take about 20 ms. For half of that time, steps can neither begin nor end.
    """
    still = take_still(engine, sequence_id)
    started = time.perf_counter()
    usage = measure(still.inventory, still.swapped_bytes, still.host_inventory, still.token_bytes)
    memory = engine.memory
    arena = arena_of(still.inventory)
    colours = dict(zip(arena["pool_names"], arena["pool_colours"], strict=True))
    shown: dict[str, Any] = {
        "object": "memory",
        "at": time.time(),
        "model": model_id,
        "device": str(memory.spec.device),
        "rollback_window": memory.rollback_window,
        "fold": memory.fold,
        "page_tokens": memory.page_tokens,
        "bytes": _bytes(usage),
        "kinds": [row | {"colour": colours[row["kind"]]} for row in _kinds(usage)],
        "sequences": _sequences(usage.by_sequence) | {"n_swapped_out": still.n_swapped_out},
        "arena": arena,
        "engine": engine_counts(engine),
        "sequence": still.chosen,
    }
    shown["cost"] = {"seconds": still.seconds + time.perf_counter() - started, "held_seconds": still.seconds}
    return shown


def engine_counts(engine: Engine) -> dict[str, Any]:
    """Return the load and the counts of an engine. From two of them, a client can compute rates."""
    stats, load, swaps = engine.stats, engine.load, engine.memory.counters.swaps
    return {
        "running": load.running,
        "waiting": load.waiting,
        "preempted": load.preempted,
        "n_steps": stats.n_steps,
        "n_fed": stats.n_fed,
        "n_reused": stats.n_reused,
        "n_generated": stats.n_generated,
        "step_seconds": stats.seconds,
        "recomputed": dict(stats.recomputed),
        "n_preempted": stats.n_preempted,
        "n_swapped_in": stats.n_swapped_in,
        "n_taken_back": stats.n_taken_back,
        "n_discarded": stats.n_discarded,
        "swaps": {"to_host": swaps.n_to_host, "to_disk": swaps.n_to_disk, "back": swaps.n_back},
    }


def _bytes(usage: Usage) -> dict[str, Any]:
    names = ("budget_bytes", "used_bytes", "free_bytes", "padding_bytes", "shared_bytes", "host_bytes", "disk_bytes")
    parts = {part: n for part, n in usage.by_part.items() if n}
    return {name.removesuffix("_bytes"): getattr(usage, name) for name in names} | {
        "parts": parts,
        "beside": usage.host,
    }


def _kinds(usage: Usage) -> list[dict[str, Any]]:
    """Return the bytes of each pool of each layer memory, divided as in the rows of `usage.tables`."""
    rows = []
    for group, kind in dict.fromkeys((place.group, place.kind) for place in usage.held):
        parts = {part: usage.held[Place(group, kind, part)] for part in PARTS}
        about = {"group": group, "kind": kind, "n_layers": len(usage.layers[group])}
        total = {"total": sum(parts.values()), "shared": usage.shared[kind], "block": usage.block_bytes[kind]}
        rows.append(about | {part: n for part, n in parts.items() if n} | total)
    return rows


def _sequences(by_sequence: BySequence) -> dict[str, Any]:
    """Return a row for each of the largest sequences and checkpoints, and the sums of the others."""
    ids = np.fromiter(by_sequence.index, np.int64, len(by_sequence))
    total = by_sequence.held_SP.sum(1) + by_sequence.swapped
    order = np.argsort(-total, kind="stable")
    top, rest = order[:MOST_SEQUENCES], order[MOST_SEQUENCES:]
    of_part = {
        part: sum((by_sequence.held_SP[:, i] for i, place in enumerate(by_sequence.places) if place.part == part), 0)
        for part in ("body", "tail", "head")
    }
    columns = {
        "id": ids, "is_checkpoint": by_sequence.is_checkpoint.astype(int), "n_tokens": by_sequence.lengths,
        **{part: np.broadcast_to(n, ids.shape) for part, n in of_part.items()},
        "shared": by_sequence.shared, "swapped": by_sequence.swapped,
    }  # fmt: skip
    return {
        "n": len(ids) - int(by_sequence.is_checkpoint.sum()),
        "n_checkpoints": int(by_sequence.is_checkpoint.sum()),
        "columns": list(columns),
        "rows": np.stack([column[top] for column in columns.values()], 1).tolist(),
        "others": {
            "n": len(rest), "n_tokens": int(by_sequence.lengths[rest].sum()), "bytes": int(total[rest].sum()),
        },
    }  # fmt: skip


def _describe(memory: HybridMemory, sequence_id: Chosen) -> dict[str, Any] | None:
    """Return how far a sequence can be rolled back, and what each layer stores of it. Raises ApiError 404."""
    found = _find(memory, sequence_id)
    if found is None:
        if sequence_id in (None, "newest"):
            return None
        message = f"There is no sequence {sequence_id} in the memory; it was closed, or never opened."
        raise ApiError(404, message, param="sequence", code="sequence_not_found")
    marks = [c for c in memory.counters.checkpoints(found) if c is not found]
    return {
        "id": found.id,
        "is_checkpoint": found.is_checkpoint,
        "length": found.length,
        "horizon": found.horizon,
        "is_swapped": found.is_swapped,
        "checkpoints": sorted(_mark(mark) for mark in marks[-_MOST_CHECKPOINTS:]),
        "n_checkpoints": len(marks),
        "layers": [_layer(row) for row in layer_rows(memory, found)],
    }


def _find(memory: HybridMemory, sequence_id: Chosen) -> Sequence | None:
    """Return the chosen sequence.

    The newest is the one opened last; a checkpoint is chosen only if there is nothing else.
    """
    if sequence_id is None:
        return None
    sequences = memory.sequences
    if sequence_id == "newest":
        return next((s for s in reversed(sequences) if not s.is_checkpoint), sequences[-1] if sequences else None)
    return next((s for s in sequences if s.id == sequence_id), None)


def _mark(checkpoint: Sequence) -> tuple[int, int]:
    return checkpoint.length, checkpoint.id


def _layer(row: LayerRow) -> dict[str, Any]:
    columns = ("part", "start", "end", "n_bytes", "fold_tokens", "is_folded")
    parts = [{name: getattr(stretch, name) for name in columns} for stretch in row.stretches]
    window = getattr(row.memory, "window", None)
    return {"layer": row.layer, "label": row.label, "window": window, "parts": parts}
