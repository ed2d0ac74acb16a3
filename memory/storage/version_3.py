"""Reads saved sequences of format version 3 and before, whose attention kept nothing of what had folded lately.

Their bodies held no evicted rows, and their exact rows ended where quantised ones, or a body with a storage, began. So
such a sequence can be rolled back only to lengths at which the same rows have folded, until it has gone further.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s, ceil_div
from hybridmem.memory.blocks.holdings import Record
from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.errors import FormatError
from hybridmem.memory.eviction import EvictionPolicy
from hybridmem.memory.layer_memories import LayerMemories, Snapshot
from hybridmem.memory.sequences.folding import FoldPoints, TailRules
from hybridmem.memory.specs import AttentionSpec


def with_room(
    path: str, snapshot: Snapshot, about: dict[str, Any], layers: LayerMemories, rollback_window: int
) -> Snapshot:
    """Return a file's snapshot with blocks of today's sizes.

    Raises FormatError: the file contradicts itself, or the sequence was rolled back to a length at which less has
    folded than its file holds folded.
    """
    try:
        return _with_room(path, snapshot, about, layers, rollback_window)
    except FormatError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise FormatError(f"{path} contradicts itself ({error}); save the sequence again") from error


def _with_room(
    path: str, snapshot: Snapshot, about: dict[str, Any], layers: LayerMemories, rollback_window: int
) -> Snapshot:
    records, blocks = dict(snapshot.records), dict(snapshot.blocks)
    for own, memory in layers.items():
        spec = layers.members[own][0][1]
        if not isinstance(spec, AttentionSpec) or own not in records:
            continue
        if isinstance(spec.policy, EvictionPolicy):
            _check_folds(path, about, FoldPoints(rollback_window, spec.policy.every))
            (states, body), (tails, tail) = memory.pools
            body_at, length = int(records[own]["positions"][0]), len(about["tokens"])
            ring_rows = ceil_div(rollback_window, spec.policy.every) * spec.policy.every
            records[own] = _with_floor(records[own], body_at, rollback_window)
            if states.name in blocks:
                kept = np.arange(_n_rows(body) - ring_rows)
                blocks[states.name] = _moved(blocks[states.name], body, len(kept), kept, kept)
            if tails.name in blocks and spec.storage is not None:
                n_before = TailRules.of_attention(rollback_window, spec.policy.every, 0).tail_rows
                held = np.arange(body_at, length)
                blocks[tails.name] = _moved(blocks[tails.name], tail, n_before, held % n_before, held % _n_rows(tail))
        elif spec.storage is not None:
            _check_folds(path, about, FoldPoints(rollback_window, spec.storage.group))
    return Snapshot(records, blocks)


def _check_folds(path: str, about: dict[str, Any], points: FoldPoints) -> None:
    folded, passed = points.last(np.array([int(about["peak"]), len(about["tokens"])])).tolist()
    if folded != passed:
        raise FormatError(
            f"{path} has format version {about['version']} and was saved after a rollback to {len(about['tokens'])} "
            f"tokens, when tokens up to {folded} had folded, {folded - passed} more than at that length; feed its "
            "tokens again"
        )


def _with_floor(record: Record, body_at: int, rollback_window: int) -> Record:
    """Return the record of a slot that goes back only to where the body's fold has taken place."""
    return record | {"base": [0, body_at + rollback_window if body_at else 0]}


def _n_rows(layout: BlockLayout) -> int:
    """Return the number of rows of a block all of whose fields have rows."""
    field = layout.fields[0]
    assert field.row_axis is not None, "bodies and tails of attention are rows"
    return field.shape[field.row_axis]


def _moved(blocks: Tensor, layout: BlockLayout, n_before: int, sources: Int64s, targets: Int64s) -> Tensor:
    """Return blocks of this layout, with rows from blocks that had `n_before` rows: sources[i] becomes targets[i]."""
    shapes = [_with_rows(field.shape, field.row_axis or 0, n_before) for field in layout.fields]
    before = BlockLayout.of([(shape, field.dtype) for shape, field in zip(shapes, layout.fields, strict=True)])
    moved = torch.zeros(len(blocks), layout.block_bytes, dtype=torch.uint8)
    if blocks.shape[1] != before.block_bytes:
        raise ValueError(f"blocks have {blocks.shape[1]} bytes, not {before.block_bytes}")
    for old, new in zip(before.fields, layout.fields, strict=True):
        n_leading = len(blocks) * math.prod(new.shape[: new.row_axis or 0])
        rows = blocks[:, old.offset_bytes : old.end_bytes].reshape(n_leading, n_before, -1)
        own = torch.zeros(n_leading, new.shape[new.row_axis or 0], rows.shape[2], dtype=torch.uint8)
        own[:, torch.from_numpy(targets)] = rows[:, torch.from_numpy(sources)]
        moved[:, new.offset_bytes : new.end_bytes] = own.view(len(blocks), -1)
    return moved


def _with_rows(shape: tuple[int, ...], axis: int, n_rows: int) -> tuple[int, ...]:
    return (*shape[:axis], n_rows, *shape[axis + 1 :])
