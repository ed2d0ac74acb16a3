"""Makes inputs of recurrences for tests of kernels: parts of rows, and states behind tails."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.kernels import StateSlots, Tail, reference
from tests.memory.kernels.test_kernels import Slots


def moved(x: Any, device: torch.device) -> Any:
    """Return a copy on the device, of tensors and of tuples of them."""
    if isinstance(x, Tensor):
        return x.clone().to(device)
    if isinstance(x, tuple):
        parts = (moved(part, device) for part in x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def flats_of(x: Any) -> list[Tensor]:
    """Return the arenas in a function's arguments."""
    if isinstance(x, StateSlots):
        return [x.flat, *(x.tail.flats if x.tail is not None else ())]
    return [flat for part in x for flat in flats_of(part)] if isinstance(x, tuple | list) else []


def forget_folded(x: Any) -> None:
    """Overwrite ring entries of tokens that the new state already contains. Kernels may write them or not."""
    if not isinstance(x, StateSlots):
        for part in x if isinstance(x, tuple) else ():
            forget_folded(part)
    elif x.tail is not None and len(x.tail.flats) > 1:
        tail = x.tail
        for i, (target, fold, count, n) in enumerate(
            zip(x.targets, tail.folds, tail.counts, np.diff(x.cu_rows.host), strict=True)
        ):
            kept = {int(tail.firsts[i] + p) % tail.ring_rows for p in range(int(max(fold, count)), int(count + n))}
            for p in range(int(count), int(min(fold, count + n)) if target >= 0 else 0):
                slot = int(tail.firsts[i] + p) % tail.ring_rows
                for flat, blocks in zip(tail.flats, tail.targets, strict=True) if slot not in kept else ():
                    size = flat.numel() // (2 * len(tail.counts) * tail.ring_rows)
                    flat[blocks[i] + slot * size : blocks[i] + (slot + 1) * size] = torch.nan


def rows_of(n: int, *sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return parts of one wider row, (n, size) each, as projections do."""
    return list(torch.split(torch.randn(n, sum(sizes) + 3, dtype=torch.float32).to(dtype)[:, 3:], list(sizes), dim=1))


def table(dtype: torch.dtype) -> torch.dtype:
    """Return which line of the tolerances a dtype uses. Float16 rounds finer than bfloat16."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def matrix_rows(
    n: int, n_heads: int, n_groups: int, n_rows: int, n_columns: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v. Keys have length 1, so that erasing is stable."""
    q, k, v = rows_of(n, n_groups * n_columns, n_groups * n_columns, n_heads * n_rows)
    k = F.normalize(k.unflatten(1, (n_groups, n_columns)), dim=-1)
    return q.unflatten(1, (n_groups, n_columns)).to(dtype), k.to(dtype), v.unflatten(1, (n_heads, n_rows)).to(dtype)


def behind_tails(
    shape: tuple[int, ...], rings: tuple[tuple[int, ...], ...], counts: tuple[int, ...], lengths: tuple[int, ...],
    folds: tuple[int, ...], dtype: torch.dtype = torch.float32, *, initial: float = 0.0,
) -> StateSlots:  # fmt: skip
    """Return segments behind tails of `counts` tokens, in rings that are just as long as they must be.

    A fold of 0 asks for no state. The first segment has no state. Even segments write into their own ring if it has
    room, others into another ring.
    """
    n, ring_rows = len(counts), max(max(c + t - f, c) for c, t, f in zip(counts, lengths, folds, strict=True))
    state = Slots(shape, lengths, torch.float32 if len(rings) > 1 else dtype, initial)
    wanted = [target if fold else -1 for target, fold in zip(state.targets, folds, strict=True)]
    slots = state.fresh()._replace(targets=torch.tensor(wanted))
    has_room = torch.tensor(counts) + torch.tensor(lengths) <= ring_rows
    own, copies = torch.arange(n) * 2, torch.arange(n) * 2 + torch.where(has_room, torch.arange(n) % 2, 1)
    sizes = [int(np.prod(ring)) * ring_rows for ring in rings]
    is_matrix = len(shape) == 3 and len(rings) > 1
    dtypes = [torch.float32 if is_matrix and i == 2 else dtype for i in range(len(rings))]
    flats = tuple(torch.full((2 * n * size,), torch.nan, dtype=of) for size, of in zip(sizes, dtypes, strict=True))
    sources, targets = (tuple(blocks * size for size in sizes) for blocks in (own, copies))
    firsts = torch.randint(0, ring_rows, (n,))
    tail = Tail(flats, sources, targets, ring_rows, firsts, torch.tensor(counts), torch.tensor(folds))
    empty = tail._replace(counts=torch.zeros(n, dtype=torch.int64), targets=sources)
    for i, count in enumerate(counts):
        if count:
            old = [torch.randn(count, *ring) for ring in rings]
            if is_matrix:
                old[0], old[2] = F.normalize(old[0], dim=-1), -torch.rand(count, *rings[2])
            reference.write_tail_rows_(empty, i, *old)
    return slots._replace(tail=tail)
