"""`HybridCache`: sequences of a memory, as transformers' models and `generate` know a cache.

transformers sees a batch as a rectangle of columns; a memory holds sequences of any lengths. Here one becomes the other: padding never
enters the memory, and each row ends in the newest column:

    columns      0 1 2 3 4 5
    row 0        . . a b c d      a sequence of 4 tokens, 2 columns of padding
    row 1        a b c d e f      a sequence of 6 tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from memory import BatchError, HybridMemory, RollbackError, Sequence, SequenceError, SpecError, Step, StepError

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Pass:
    """One forward of a transformers model: a rectangle (B, T) of tokens, and the step's packed ones.

    Attributes:
        shape: (B, T).
        rows: (N,) index in the flattened rectangle of each packed token; None if that is all of them, in order.
        position_ids: (B, T) int64, 0 where there is padding.
    """

    cache: HybridCache
    step: Step
    shape: tuple[int, int]
    rows: Tensor | None
    position_ids: Tensor

    def pack(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (N, ...)."""
        flat = x.flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def unpack(self, y: Tensor) -> Tensor:
        """(N, ...) -> (B, T, ...), zeros where there is padding."""
        if self.rows is not None:
            y = y.new_zeros(self.shape[0] * self.shape[1], *y.shape[1:]).index_copy_(0, self.rows, y)
        return y.view(*self.shape, *y.shape[1:])


CURRENT_PASS: ContextVar[Pass | None] = ContextVar("forward pass on a HybridCache", default=None)
"""The pass that the code below a forward call belongs to."""


class HybridCache(Cache):  # type: ignore[misc]
    """`hf_model.generate(input_ids, past_key_values=HybridCache(memory, [alice, bob]))`, once `models.attach` has prepared the model.

    Row i of every batch belongs to sequence i. The sequences stay the caller's: they can be rolled back, marked, saved and swapped out
    between calls as ever, and closed one by one or by `close`. A forward is a step of the memory: all rows advance, or none.

    Args:
        sequences: one for each row; of any lengths, so that some rows may have padding on their left.
    Raises:
        SequenceError: a handle that cannot take part in a step. BatchError: none, or one that is given twice.
    """

    is_compileable = False
    is_initialized = True

    def __init__(self, memory: HybridMemory, sequences: Iterable[Sequence]) -> None:
        super().__init__(layers=[])
        self.memory = memory
        self._sequences = _check_rows(memory, sequences)
        self._n_padding_columns = 0

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Of each row."""
        return tuple(self._sequences)

    # What transformers asks

    @property
    def batch_size(self) -> int:
        return len(self._sequences)

    def __len__(self) -> int:
        return len(self.memory.spec.layers)

    def __repr__(self) -> str:
        return f"<HybridCache of {self._sequences} for {self.memory.spec.model}>"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far: the longest row, and columns in which every row has padding."""
        return max(sequence.length for sequence in self._sequences) + self._n_padding_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit but the memory's budget."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.get_seq_length() > 0

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` puts everything back as it was; within the rollback window it does."""
        return self.memory.rollback_window > 0

    def activate_past_recording(self) -> None:
        """Nothing to do: what `crop` needs is always kept, for the memory's `rollback_window` tokens."""

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # Going back, and rows

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest -n columns (n < 0), or keep the first n (n > 0), exactly and in all rows; 0 changes nothing.

        Raises:
            RollbackError: beyond the rollback window of a row and no checkpoint there, or more columns than there are. Nothing changed.
        """
        n_columns = self.get_seq_length()
        n_removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, n_columns - tokens_to_remove)
        if n_removed > n_columns:
            raise RollbackError(
                f"crop({tokens_to_remove}) of a cache of {n_columns} columns; take back {n_columns} at most",
                to=n_columns - n_removed, horizon=0, resume_at=0,
            )  # fmt: skip
        if n_removed:
            self._return_to([max(0, sequence.length - n_removed) for sequence in self._sequences], n_columns - n_removed)

    def reset(self) -> None:
        """Forget all tokens of all rows."""
        self._return_to([0] * len(self._sequences), 0)

    def _return_to(self, lengths: list[int], n_columns: int) -> None:
        rows = list(zip(self._sequences, lengths, strict=True))
        for sequence, length in rows:
            if not self.memory.can_rollback(sequence, length):
                self.memory.rollback(sequence, length)  # says why
        for sequence, length in rows:
            self.memory.rollback(sequence, length)
        self._n_padding_columns = n_columns - max(lengths)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on as row beam_idx[i] was, all at once; nothing is copied."""
        sources = self._read_rows(beam_idx)
        if len(sources) != len(self._sequences):
            raise BatchError(f"{len(sources)} rows for a cache of {len(self._sequences)}; batch_select_indices changes their number")
        self.memory.reorder({row: self._sequences[i] for row, i in zip(self._sequences, sources, strict=True)})

    def batch_select_indices(self, indices: Tensor) -> None:
        """Row i becomes what row indices[i] is; a row that is chosen again is forked, and one that is not stays open, outside the cache."""
        chosen = self._read_rows(indices)
        if not chosen:
            raise BatchError("no row is chosen; a cache has at least one")
        n_columns = self.get_seq_length()
        is_first = [i not in chosen[:n] for n, i in enumerate(chosen)]
        forks = iter(self._forks([self._sequences[i] for i, first in zip(chosen, is_first, strict=True) if not first]))
        self._sequences = [self._sequences[i] if first else next(forks) for i, first in zip(chosen, is_first, strict=True)]
        self._n_padding_columns = n_columns - max(sequence.length for sequence in self._sequences)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row and `repeats` - 1 forks of it, one after the other: `num_beams` or `num_return_sequences` of a prompt that is cached."""
        self.batch_select_indices(torch.arange(len(self._sequences)).repeat_interleave(repeats))

    def fork(self) -> HybridCache:
        """Another cache whose rows go on from where these stand; nothing is copied. `copy.deepcopy` of a cache is this."""
        fork = HybridCache(self.memory, self._forks(self._sequences))
        fork._n_padding_columns = self._n_padding_columns
        return fork

    def __deepcopy__(self, memo: dict[int, object]) -> HybridCache:
        return self.fork()

    def _forks(self, sources: list[Sequence]) -> list[Sequence]:
        forks: list[Sequence] = []
        try:
            for source in sources:
                forks.append(self.memory.fork(source))
        except BaseException:
            for fork in forks:
                self.memory.close(fork)
            raise
        return forks

    def _read_rows(self, indices: Tensor) -> list[int]:
        indices = torch.as_tensor(indices)
        rows = (indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices).tolist()
        for row in rows:
            if not 0 <= row < len(self._sequences):
                raise BatchError(f"row {row} of a cache of {len(self._sequences)} rows")
        return rows

    def close(self) -> None:
        """Close the sequences of all rows: what nobody else shares is free at once."""
        for sequence in self._sequences:
            if not sequence.closed:
                self.memory.close(sequence)

    # A forward

    @contextmanager
    def open_pass(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Iterator[Pass]:
        """A step of the memory over the tokens of a forward call; see `Pass`. The arguments are those of transformers' models.

        Args:
            input_ids: (B, T). attention_mask: (B, columns so far + T), 0 for padding on the left; None for none in these T columns.
            position_ids: what the caller believes, (..., B or 1, T), which is compared; None for no opinion.
        Raises:
            BatchError: another number of rows; padding elsewhere; a mask or positions that contradict what is remembered. Nothing changed.
        """
        n_columns, (n_rows, n_new) = self.get_seq_length(), input_ids.shape
        if n_rows != len(self._sequences):
            raise BatchError(
                f"a batch of {n_rows} rows for a cache of {len(self._sequences)}; give HybridCache a sequence for each row, which is "
                "num_beams or num_return_sequences for each prompt (`cache.batch_repeat_interleave` forks those it has)"
            )
        lengths = np.array([sequence.length for sequence in self._sequences])
        is_new = np.ones((n_rows, n_new), np.bool_)
        if attention_mask is not None:
            is_new = _read_mask(attention_mask, lengths, n_columns, n_new)
        positions = np.where(is_new, lengths[:, None] + is_new.cumsum(1) - 1, 0)
        if position_ids is not None:
            _check_positions(position_ids, positions, is_new)
        ids = input_ids.cpu().numpy()
        requests = [(self._sequences[i], ids[i, is_new[i]]) for i in is_new.any(1).nonzero()[0]]
        with self.memory.step(requests, outputs="all") as step:
            rows = _rows_of(step, is_new)
            yield Pass(
                self, step, (n_rows, n_new), None if rows is None else rows.to(input_ids.device),
                torch.from_numpy(positions).to(input_ids.device),
            )  # fmt: skip
        self._n_padding_columns = n_columns + n_new - max(sequence.length for sequence in self._sequences)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Keys and values as they are: what is remembered joins them where the attention itself is computed."""
        current = CURRENT_PASS.get()
        if current is None or current.cache is not self:
            self._not_attached()
        return key_states, value_states

    def _not_attached(self, *args: object, **kwargs: object) -> NoReturn:
        raise StepError(
            "this model is not prepared for a HybridCache: call models.attach(model) first, and then the model itself, not a part of it"
        )

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = update_indexer = _not_attached

    def _not_offloaded(self, *args: object, **kwargs: object) -> NoReturn:
        raise SpecError("a HybridCache cannot be moved or allocated by layers; memory.swap_out(sequence) moves what waits")

    offload = prefetch = early_initialization = _not_offloaded


def _check_rows(memory: HybridMemory, sequences: Iterable[Sequence]) -> list[Sequence]:
    rows = list(sequences)
    if not rows:
        raise BatchError("a HybridCache without rows; give it a sequence for each row: HybridCache(memory, [memory.open()])")
    for row in rows:
        if not isinstance(row, Sequence):
            raise SequenceError(f"{row!r} is no sequence; give HybridCache what memory.open() or memory.fork(...) returns")
        memory.resume_point(row, 0)  # raises for a handle that is closed, a checkpoint, swapped out or another memory's
    if len(set(rows)) < len(rows):
        twice = next(row for row in rows if rows.count(row) > 1)
        raise BatchError(f"{twice!r} cannot be two rows of a cache; fork it: memory.fork(...)")
    return rows


def _read_mask(mask: Tensor, lengths: NDArray[np.int64], n_columns: int, n_new: int) -> Bools:
    """Which of the new tokens are real, (B, T)."""
    expected = (len(lengths), n_columns + n_new)
    if not isinstance(mask, Tensor) or mask.shape != expected:
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchError(
            f"an attention_mask {found}; give one number for each row and column, those of before included, {expected}, or leave it out"
        )
    is_real = mask.bool().cpu().numpy()
    if (is_real[:, 1:] < is_real[:, :-1]).any():
        row = int((is_real[:, 1:] < is_real[:, :-1]).any(1).argmax())
        raise BatchError(
            f"row {row} of the attention_mask has padding behind its first token; pad on the left (padding_side='left'), and give generate "
            "the mask: without one it takes every pad token for padding"
        )
    n_real = is_real.sum(1)
    if (row := (np.maximum(n_real - n_new, 0) != lengths)).any():
        i = int(row.argmax())
        raise BatchError(
            f"the attention_mask says that row {i} has {max(n_real[i] - n_new, 0)} tokens before these {n_new} columns, its sequence holds "
            f"{lengths[i]}; mark {lengths[i]} of the first {n_columns} columns, the last ones"
        )
    return is_real[:, n_columns:]


def _check_positions(given: Tensor, positions: NDArray[np.int64], is_new: Bools) -> None:
    believed = given.cpu().numpy()
    if believed.shape[-1] != positions.shape[1] or (believed.ndim > 1 and believed.shape[-2] not in (1, len(positions))):
        raise BatchError(f"position_ids {believed.shape} for tokens {positions.shape}; give one for each, or leave them out")
    wrong = ((believed != positions) & is_new).reshape(-1, *positions.shape).any(0)
    if wrong.any():
        row, column = (int(index[0]) for index in wrong.nonzero())
        raise BatchError(
            f"position_ids put row {row} at {believed[..., min(row, believed.shape[-2] - 1), column].flat[0]} where its sequence is at "
            f"{positions[row, column]}; feed only what follows the tokens that the cache holds, with the attention_mask of all columns"
        )


def _rows_of(step: Step, is_new: Bools) -> Tensor | None:
    """`Pass.rows`: requests are the rows of the rectangle, which the step may have put into another order."""
    flat = torch.from_numpy(is_new.reshape(-1).nonzero()[0])
    place = step.select(torch.arange(len(flat)))
    rows = torch.empty_like(flat)
    rows[place] = flat
    return None if len(rows) == is_new.size and torch.equal(rows, torch.arange(len(rows))) else rows
