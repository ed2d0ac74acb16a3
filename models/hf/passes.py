"""Turns a forward call of a transformers model into a step of a memory.

For transformers, a batch is a rectangle of rows and columns. A memory holds sequences of any lengths. This module
translates between the two: padding never enters the memory, and each row ends in the newest column:

    columns      0 1 2 3 4 5
    row 0        . . a b c d      a sequence of 4 tokens, 2 columns of padding
    row 1        a b c d e f      a sequence of 6 tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridmem.memory import BatchError, HybridMemory, Sequence, Step
from hybridmem.memory.blocks import Scoped

Bools = NDArray[np.bool_]


@dataclass
class Pass:
    """Relates the rectangle (B, T) of tokens of one forward call to the packed tokens of its step.

    Attributes:
        shape: (B, T).
        rows: (N,) index of each packed token in the flattened rectangle; None if all tokens are packed, in order.
        position_ids: (B, T) int64, 0 where there is padding.
        attending: the index of the layer whose keys and values were last given to the cache. Modules that several
            layers share do not know their layer's index.
    """

    memory: HybridMemory
    step: Step
    shape: tuple[int, int]
    rows: Tensor | None
    position_ids: Tensor
    attending: int = -1
    given: tuple[Tensor, Tensor] | None = None

    def pack(self, x: Tensor) -> Tensor:
        """Return the packed rows (N, ...) of x (B, T, ...)."""
        flat = x.flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def unpack(self, y: Tensor) -> Tensor:
        """Return packed rows (N, ...) as (B, T, ...), with zeros where there is padding."""
        if self.rows is not None:
            y = y.new_zeros(self.shape[0] * self.shape[1], *y.shape[1:]).index_copy_(0, self.rows, y)
        return y.reshape(*self.shape, *y.shape[1:])


CURRENT_PASS = Scoped["Pass | None"]("forward pass on a HybridCache", None)
"""The pass of the forward call that is running, or None."""


@contextmanager
def open_pass(
    memory: HybridMemory, sequences: list[Sequence], n_columns: int, inputs: tuple[Tensor, Tensor | None, Tensor | None]
) -> Iterator[Pass]:
    """Open a step over the tokens of a forward call. When it ends, all rows advance, or none.

    Args:
        sequences: the sequence of each row.
        n_columns: the number of earlier columns, padding included.
        inputs: three tensors. input_ids is (B, T). attention_mask is (B, n_columns + T) with 0 for padding on the left,
            or None if these T columns have no padding. position_ids is (..., B or 1, T) and is compared with the
            memory's positions, or None.
    Raises:
        BatchError: the number of rows differs from that of the sequences, padding is not on the left, or mask or
            positions contradict what is remembered. Nothing has changed then.
        Other errors: those of `HybridMemory.step`.
    """
    (input_ids, attention_mask, position_ids), (n_rows, n_new) = inputs, inputs[0].shape
    if n_rows != len(sequences):
        raise BatchError(
            f"a batch of {n_rows} rows for a cache of {len(sequences)}; give HybridCache a sequence for each row, "
            "which is num_beams or num_return_sequences for each prompt (`cache.batch_repeat_interleave` forks those "
            "it has)"
        )
    lengths = np.array([sequence.length for sequence in sequences])
    is_new = np.ones((n_rows, n_new), np.bool_)
    if attention_mask is not None:
        is_new = _read_mask(attention_mask, lengths, n_columns, n_new)
    positions = np.where(is_new, lengths[:, None] + is_new.cumsum(1) - 1, 0)
    if position_ids is not None:
        _check_positions(position_ids, positions, is_new)
    ids = input_ids.cpu().numpy()
    requests = [(sequences[i], ids[i, is_new[i]]) for i in np.flatnonzero(is_new.any(1))]
    with memory.step(requests, outputs="all") as step:
        rows = _rows_of(step, is_new)
        yield Pass(
            memory, step, (n_rows, n_new), None if rows is None else rows.to(input_ids.device),
            torch.from_numpy(positions).to(input_ids.device),
        )  # fmt: skip


def _read_mask(mask: Tensor, lengths: NDArray[np.int64], n_columns: int, n_new: int) -> Bools:
    """Return which of the new tokens are not padding, (B, T)."""
    expected = (len(lengths), n_columns + n_new)
    if not isinstance(mask, Tensor) or mask.shape != expected:
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchError(
            f"an attention_mask {found}; give one number for each row and column, those of before included, "
            f"{expected}, or leave it out"
        )
    is_real = mask.bool().cpu().numpy()
    if (is_real[:, 1:] < is_real[:, :-1]).any():
        row = int((is_real[:, 1:] < is_real[:, :-1]).any(1).argmax())
        raise BatchError(
            f"row {row} of the attention_mask has padding behind its first token; pad on the left "
            "(padding_side='left'), and give generate the mask: without one it takes every pad token for padding"
        )
    n_real = is_real.sum(1)
    if (row := (np.maximum(n_real - n_new, 0) != lengths)).any():
        i = int(row.argmax())
        raise BatchError(
            f"the attention_mask says that row {i} has {max(n_real[i] - n_new, 0)} tokens before these {n_new} "
            f"columns, its sequence holds {lengths[i]}; mark {lengths[i]} of the first {n_columns} columns, the "
            "last ones"
        )
    return is_real[:, n_columns:]


def _check_positions(given: Tensor, positions: NDArray[np.int64], is_new: Bools) -> None:
    believed = given.cpu().numpy()
    if believed.shape[-1] != positions.shape[1] or (
        believed.ndim > 1 and believed.shape[-2] not in (1, len(positions))
    ):
        raise BatchError(
            f"position_ids {believed.shape} for tokens {positions.shape}; give one for each, or leave them out"
        )
    wrong = ((believed != positions) & is_new).reshape(-1, *positions.shape).any(0)
    if wrong.any():
        row, column = (int(index[0]) for index in wrong.nonzero())
        raise BatchError(
            f"position_ids put row {row} at {believed[..., min(row, believed.shape[-2] - 1), column].flat[0]} where "
            f"its sequence is at {positions[row, column]}; feed only what follows the tokens that the cache holds, "
            "with the attention_mask of all columns"
        )


def _rows_of(step: Step, is_new: Bools) -> Tensor | None:
    """Return `Pass.rows`. A request is a row of the rectangle, and the step may have reordered the requests."""
    flat = torch.from_numpy(is_new.reshape(-1).nonzero()[0])
    place = step.select(torch.arange(len(flat)))
    rows = torch.empty_like(flat)
    rows[place] = flat
    return None if len(rows) == is_new.size and torch.equal(rows, torch.arange(len(rows))) else rows
