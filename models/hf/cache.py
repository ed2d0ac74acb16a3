"""Implements `HybridCache`: sequences of a memory with the interface of transformers' `Cache`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from hybridmem.memory import BatchError, HybridMemory, RollbackError, Sequence, SequenceError, SpecError, StepError
from hybridmem.memory.hybrid import require_memory
from hybridmem.models.hf.passes import CURRENT_PASS, Pass, open_pass


def cache_argument(hf_model: PreTrainedModel) -> str:
    """Return the name of the argument by which `forward` of this model takes caches.

    Transformers 5.24 has changed it.
    """
    parameters = inspect.signature(type(hf_model).forward).parameters
    return next(name for name in ("cache", "cache_params", "past_key_values") if name in parameters)


class HybridCache(Cache):  # type: ignore[misc]
    """Lets sequences of a memory be the cache of a transformers model that `models.attach` has prepared.

    Use it as `hf_model.generate(input_ids, cache=HybridCache(memory, [alice, bob]))`. Before transformers 5.24 the
    argument is `past_key_values=`. Row i of every batch belongs to sequence i. The sequences still belong to the
    caller: between calls they can be rolled back, checkpointed, saved and swapped out as usual, and closed one by one
    or by `close`. A forward is one step of the memory: all rows advance, or none.

    Args:
        sequences: one for each row, of any lengths. Shorter rows have padding on their left.
    Raises:
        SequenceError: a handle cannot take part in a step.
        BatchError: there is no sequence, or one is given twice.
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
        """Return the sequence of each row."""
        return tuple(self._sequences)

    # Transformers reads these members.

    @property
    def batch_size(self) -> int:
        return len(self._sequences)

    def __len__(self) -> int:
        return len(self.memory.spec.layers)

    def __repr__(self) -> str:
        return f"<HybridCache of {self._sequences} for {self.memory.spec.model}>"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns so far: those of the longest row, and columns in which every row has padding."""
        return max(sequence.length for sequence in self._sequences) + self._n_padding_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1, because there is no limit except the memory's budget."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    @property
    def is_linear(self) -> list[bool]:
        """Return False for each layer, so that `generate` feeds only the tokens that a row does not hold yet."""
        return [False] * len(self.memory.spec.layers)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.get_seq_length() > 0

    @property
    def is_croppable(self) -> bool:
        """True if `crop` can take tokens back exactly, as it does within the rollback window."""
        return self.memory.rollback_window > 0

    def activate_past_recording(self) -> None:
        """Do nothing, because `crop` always has what it needs, for the memory's `rollback_window` tokens."""

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # The methods below go back, and choose rows.

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest -n columns (n < 0), or keep the first n (n > 0), of all rows, exactly; 0 does nothing.

        Raises:
            RollbackError: a row cannot be rolled back so far (it is beyond the rollback window, without a checkpoint
                there), or there are fewer columns. Nothing has changed then.
        """
        n_columns = self.get_seq_length()
        n_removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, n_columns - tokens_to_remove)
        if n_removed > n_columns:
            raise RollbackError(
                f"crop({tokens_to_remove}) of a cache of {n_columns} columns; take back {n_columns} at most",
                to=n_columns - n_removed, horizon=0, resume_at=0,
            )  # fmt: skip
        if n_removed:
            self._return_to(
                [max(0, sequence.length - n_removed) for sequence in self._sequences], n_columns - n_removed
            )

    def reset(self) -> None:
        """Remove all tokens of all rows."""
        self._return_to([0] * len(self._sequences), 0)

    def _return_to(self, lengths: list[int], n_columns: int) -> None:
        rows = list(zip(self._sequences, lengths, strict=True))
        for sequence, length in rows:
            if not self.memory.can_rollback(sequence, length):
                self.memory.rollback(sequence, to=length)  # This raises an error with the reason.
        for sequence, length in rows:
            self.memory.rollback(sequence, to=length)
        self._keep_columns(n_columns)

    def _keep_columns(self, n_columns: int) -> None:
        """Set the number of padding columns so that there are `n_columns`, whatever the longest row is now."""
        self._n_padding_columns = n_columns - max(sequence.length for sequence in self._sequences)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give row i the memory of row beam_idx[i], for all rows at once. Nothing is copied."""
        sources = self._read_rows(beam_idx)
        if len(sources) != len(self._sequences):
            raise BatchError(
                f"{len(sources)} rows for a cache of {len(self._sequences)}; batch_select_indices changes their number"
            )
        n_columns = self.get_seq_length()
        self.memory.reorder({row: self._sequences[i] for row, i in zip(self._sequences, sources, strict=True)})
        self._keep_columns(n_columns)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Make row i a copy of row indices[i].

        A row that is chosen more than once is forked. A row that is not chosen leaves the cache, and its sequence stays
        open.
        """
        chosen = self._read_rows(indices)
        if not chosen:
            raise BatchError("no row is chosen; a cache has at least one")
        n_columns = self.get_seq_length()
        is_first = [i not in chosen[:n] for n, i in enumerate(chosen)]
        forks = iter(self._forks([self._sequences[i] for i, first in zip(chosen, is_first, strict=True) if not first]))
        self._sequences = [
            self._sequences[i] if first else next(forks) for i, first in zip(chosen, is_first, strict=True)
        ]
        self._keep_columns(n_columns)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each row by itself and `repeats` - 1 forks of it, one after the other.

        It is for `num_beams` or `num_return_sequences` of a prompt that is already cached.
        """
        self.batch_select_indices(torch.arange(len(self._sequences)).repeat_interleave(repeats))

    def fork(self) -> HybridCache:
        """Return another cache whose rows are forks of these rows. Nothing is copied. `copy.deepcopy` calls it."""
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
        """Close the sequences of all rows. Blocks that no other sequence shares are freed at once."""
        for sequence in self._sequences:
            if not sequence.closed:
                self.memory.close(sequence)

    # The methods below run a forward.

    def check_prompt(self, input_ids: Tensor) -> None:
        """Raise BatchError unless a prompt of `generate` (B, columns) continues what the rows remember.

        `generate` feeds the columns after those that the cache counts, whatever the columns before contain.
        """
        n_columns, n_given = self.get_seq_length(), input_ids.shape[1]
        remedy = (
            "give the whole dialogue so far and what is new; or cache.crop(n), which keeps the first n columns; or a "
            "new cache, HybridCache(memory, [memory.open()])"
        )
        if n_columns and n_given <= n_columns:
            raise BatchError(f"a prompt of {n_given} columns for a cache that holds {n_columns}; {remedy}")
        if len(input_ids) != len(self._sequences):
            return  # `open_pass` refuses such a prompt.
        for row, (sequence, ids) in enumerate(zip(self._sequences, input_ids.cpu().numpy(), strict=True)):
            held, given = sequence.tokens, ids[n_columns - sequence.length : n_columns]
            if (differs := held != given).any():
                at = int(differs.argmax())
                raise BatchError(
                    f"row {row} of the prompt has token {given[at]} where the cache remembers {held[at]}, at position "
                    f"{at} of {len(held)}; {remedy}"
                )

    @contextmanager
    def open_pass(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Iterator[Pass]:
        """Open a step over the tokens of a forward call; arguments and errors are those of `passes.open_pass`."""
        n_columns = self.get_seq_length()
        with open_pass(self.memory, self._sequences, n_columns, (input_ids, attention_mask, position_ids)) as opened:
            yield opened
        self._keep_columns(n_columns + input_ids.shape[1])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values unchanged, because `Step.attend` adds the remembered ones."""
        current = CURRENT_PASS.get()
        if current is None or current.memory is not self.memory:
            self._not_attached()
        current.attending, current.given = layer_idx, (key_states, value_states)
        return key_states, value_states

    def _not_attached(self, *args: object, **kwargs: object) -> NoReturn:
        raise StepError(
            "this model is not prepared for a HybridCache: call models.attach(model) first, and then the model itself, "
            "not a part of it"
        )

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = update_indexer = _not_attached

    def _not_offloaded(self, *args: object, **kwargs: object) -> NoReturn:
        raise SpecError(
            "a HybridCache cannot be moved or allocated by layers; memory.swap_out(sequence) moves what waits"
        )

    offload = prefetch = early_initialization = _not_offloaded


def _check_rows(memory: HybridMemory, sequences: Iterable[Sequence]) -> list[Sequence]:
    require_memory(memory, "HybridCache(memory, sequences)")
    if not isinstance(sequences, Iterable):
        raise BatchError(
            f"{sequences!r} are no rows; give a list with a sequence for each: HybridCache(memory, [memory.open()])"
        )
    rows = list(sequences)
    if not rows:
        raise BatchError(
            "a HybridCache without rows; give it a sequence for each row: HybridCache(memory, [memory.open()])"
        )
    for row in rows:
        if not isinstance(row, Sequence):
            raise SequenceError(
                f"{row!r} is no sequence; give HybridCache what memory.open() or memory.fork(...) returns"
            )
        # This raises an error for a handle that is closed, a checkpoint, swapped out or of another memory.
        memory.resume_point(row, 0)
    if len(set(rows)) < len(rows):
        twice = next(row for row in rows if rows.count(row) > 1)
        raise BatchError(f"{twice!r} cannot be two rows of a cache; fork it: memory.fork(...)")
    return rows
