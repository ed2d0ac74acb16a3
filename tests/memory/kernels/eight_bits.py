"""Makes states of 8 bits for tests of kernels, and compares what kernels leave in them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.kernels import Erase, StateSlots
from hybridmem.memory.kernels.eight_bits import encode, read_states, stored_shape
from tests.memory.kernels.tails import behind_tails, matrix_rows

COUNTS, LENGTHS, FOLDS = (0, 1, 2, 9, 9, 3, 5), (1, 1, 2, 1, 20, 1, 3), (1, 0, 3, 4, 21, 0, 0)
"""Tails that are empty and full; one token, drafts and a prompt; bodies among old rows, across, among new, and none."""
N = sum(LENGTHS)

MODES = {
    "adds": (3, 1, 5, 16),
    "erases": (4, 2, 70, 48),
    "odd columns": (3, 3, 9, 7),
    "by column, with b": (2, 2, 6, 32),
}
"""Heads, groups, rows and columns; the first two are read in 8 bits, the others are decoded."""


def in_8_bits(slots: StateSlots, dtype: torch.dtype) -> StateSlots:
    """Return the same states in 8 bits."""
    n, stored = math.prod(slots.shape), math.prod(stored_shape(slots.shape, dtype))
    flat = torch.zeros(len(slots.flat) // n * stored, dtype=torch.uint8)
    for source in set(slots.sources.tolist()) - {-1}:
        state = slots.flat[source : source + n].view(slots.shape)
        rows = encode(state.T.contiguous() if state.dim() == 2 else state, dtype, 1)
        flat[source // n * stored : source // n * stored + stored] = rows.flatten()
    sources, targets = (torch.where(x < 0, -1, x // n * stored) for x in (slots.sources, slots.targets))
    return slots._replace(flat=flat.view(dtype), sources=sources, targets=targets)


def matrix_case(mode: str, codes: torch.dtype, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Return the arguments of `Kernels.matrix_scan` for a mode, of which the last is the states, and its options."""
    n_heads, n_groups, n_rows, n_columns = MODES[mode]
    has_b = "b" in mode.split()
    decays = (n_heads, n_columns) if has_b else (n_heads,)
    rings = [(n_groups, n_columns), (n_heads, n_rows), decays]
    rings += [(n_heads, n_columns), (n_heads, n_rows)] if has_b else []
    slots = behind_tails((n_heads, n_rows, n_columns), tuple(rings), COUNTS, LENGTHS, FOLDS, dtype)
    q, k, v = matrix_rows(N, *MODES[mode], dtype=dtype)
    b = -torch.rand(N, n_heads, 1) * F.normalize(torch.randn(N, n_heads, n_columns), dim=-1)
    erase = None if mode in ("adds", "odd columns") else Erase(k, b.to(dtype) if has_b else None, not has_b)
    options = {} if has_b else {"strength_TH": torch.rand(N, n_heads), "skip_H": torch.randn(n_heads)}
    return (q, k, v, -torch.rand(N, *decays), erase, in_8_bits(slots, codes)), options


def assert_nothing_else_written(ours: StateSlots, theirs: StateSlots) -> None:
    written = torch.zeros(len(ours.flat), dtype=torch.bool)
    size = math.prod(stored_shape(ours.shape, ours.flat.dtype))
    for target in ours.targets[ours.targets >= 0].tolist():
        written[target : target + size] = True
    bytes_ours, bytes_theirs = (x.flat.view(torch.uint8)[~written] for x in (ours, theirs))
    assert torch.equal(bytes_ours, bytes_theirs), "another part of the arena was written"


def assert_same_bodies(
    ours: Tensor, theirs: Tensor, targets: Tensor, shape: tuple[int, ...], state_dtype: str, dtype: torch.dtype, *,
    apart: float = 0.0,
) -> None:  # fmt: skip
    """Assert that bodies are the same but for roundings of sums.

    Before they are rounded to 8 bits, states may differ by the part `apart` of a row's largest number.
    """
    body, twin = (read_states(x, targets, shape, 0.0) for x in (ours, theirs))
    most = twin.abs().amax(1 if len(shape) == 2 else -1, keepdim=True)
    step = most / (127 if state_dtype == "int8" else 14)
    far = (body - twin).abs() > step * 1.001 + apart * most
    assert not bool(far.any()), "by a rounding of the sum, one code further at most"
    if dtype == torch.float32:  # With 16 bits, rounding in the rings moves more numbers to another code.
        assert float(((body - twin).abs() > 1e-3 * step).float().mean()) < 0.01
