"""Packs requests of any lengths on one flat axis of tokens, and finds each request's outputs in the caller's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hybridmem.memory.blocks.arguments import is_integer
from hybridmem.memory.blocks.arrays import Int64s, ranges, starts_of
from hybridmem.memory.blocks.staging import Download, is_apart
from hybridmem.memory.errors import BatchError
from hybridmem.memory.interface import Packed, Requests, Sequence, Tokens
from hybridmem.memory.sequences.soft_tokens import FIRST_SOFT_ID, Passage, SoftTokens

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@dataclass(eq=False)
class TokenLists:
    """Holds the token ids of several requests, one after the other in `flat` (T,). Request i has counts[i] tokens.

    The ids in `late` are still on the device. `flat` holds zeros in their place until `arrive`. `passages` are those
    that soft tokens among them stand for: as long as this object lives, their rows stay.
    """

    flat: Int64s
    counts: Int64s
    late: Download | None = None
    passages: tuple[Passage, ...] = ()

    @staticmethod
    def of(lists: list[Int64s]) -> TokenLists:
        """Join lists of token ids, (n,) each."""
        return TokenLists(np.concatenate(lists), np.fromiter(map(len, lists), np.int64, len(lists)))

    @staticmethod
    def on_their_way(parts: list[Tensor]) -> TokenLists:
        """Start the download of integer tensors on the device, (n,) or () each, without waiting for it."""
        late = Download(torch.cat([part.reshape(-1) for part in parts]).to(torch.int64))
        counts = np.array([part.numel() for part in parts], np.int64)
        return TokenLists(np.zeros(len(late.on_device), np.int64), counts, late)

    def arrive(self, sequences: list[Sequence], vocab_size: int) -> None:
        """Wait for late tokens and put them in place. Raises BatchError if one is outside the vocabulary."""
        if self.late is not None:
            self.flat[:] = self.late.wait()
            for sequence, ids in zip(sequences, self, strict=True):
                _require_in_vocabulary(ids, sequence, vocab_size)

    @cached_property
    def ends(self) -> Int64s:
        return np.cumsum(self.counts)

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[Int64s]:
        return map(self.__getitem__, range(len(self.counts)))

    def __getitem__(self, i: int) -> Int64s:
        return self.flat[self.ends[i] - self.counts[i] : self.ends[i]]


def read_pairs(requests: Requests) -> tuple[list[Sequence], list[Tokens]]:
    """Return the sequences, and the unchecked tokens of each.

    Raises BatchError if there are no requests, if an element is no request, or if a sequence occurs twice.
    """
    if not isinstance(requests, Iterable):
        raise BatchError(f"{requests!r} are no requests; give {{sequence: tokens}} or (sequence, tokens) pairs")
    if isinstance(requests, dict) and set(map(type, requests)) == {Sequence}:
        return list(requests), list(requests.values())
    return _read_pairs(requests.items() if isinstance(requests, Mapping) else requests)


def count_tokens(values: list[Any]) -> Int64s:
    """Return (S,) the number of tokens of each request. Only lengths are read, not the tokens."""

    def count(x: object) -> int:
        if isinstance(x, list):  # Lists come first, because an engine passes lists.
            return len(x)
        if isinstance(x, Tensor):
            return x.numel()
        if isinstance(x, np.ndarray):
            return x.size
        return len(x) if isinstance(x, Sized) and not isinstance(x, Sequence) else 1

    return np.maximum(np.array([count(x) for x in values], np.int64), 1)


def read_tokens(
    sequences: list[Sequence], values: list[Any], vocab_size: int, soft: SoftTokens | None = None
) -> TokenLists:
    """Read and check the token ids of each request.

    Raises BatchError, which names the request and the value, if there are no tokens, or if one is no integer with 0 <=
    id < vocab_size, and is no soft token of `soft` either.
    """
    # In a decode step, the tokens of all requests are checked at once.
    if set(map(type, values)) == {int} and 0 <= min(values) <= max(values) < vocab_size:
        return TokenLists(np.array(values, np.int64), np.ones(len(values), np.int64))
    if set(map(type, values)) == {list} and all(values):  # An engine passes lists, most of them with one token.
        flat = list(chain.from_iterable(values))
        if set(map(type, flat)) == {int} and 0 <= min(flat) <= max(flat) < vocab_size:
            return TokenLists(np.array(flat, np.int64), np.fromiter(map(len, values), np.int64, len(values)))
    if _are_late(values):
        return TokenLists.on_their_way(values)
    lists = [_read_tokens(*pair, vocab_size, soft) for pair in zip(sequences, values, strict=True)]
    tokens = TokenLists.of(lists)
    return tokens if soft is None else replace(tokens, passages=soft.held(tokens.flat))


def _are_late(values: list[Tokens]) -> TypeGuard[list[Tensor]]:
    """True if all are integer tensors on a device for which the host would have to wait. If False, all are read now."""
    return all(
        isinstance(x, Tensor) and is_apart(x.device) and x.dtype in _INTEGERS and x.dim() <= 1 and x.numel()
        for x in values
    )  # fmt: skip


def _read_pairs(requests: Iterable[tuple[Sequence, Tokens]]) -> tuple[list[Sequence], list[Tokens]]:
    """Check pairs of a sequence and its tokens, and separate them. Raises BatchError."""
    pairs = list(requests)
    if not pairs:
        raise BatchError("the step has no requests; give at least one sequence its tokens")
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Sequence)):
            raise BatchError(f"{pair!r} is no request; give {{sequence: tokens}} or (sequence, tokens) pairs")
    sequences = [sequence for sequence, _ in pairs]
    if len(set(sequences)) != len(sequences):
        twice = next(s for s in sequences if sequences.count(s) > 1)
        raise BatchError(f"{twice!r} occurs in more than one request; join its tokens into one")
    return sequences, [tokens for _, tokens in pairs]


def _read_tokens(sequence: Sequence, tokens: Tokens, vocab_size: int, soft: SoftTokens | None) -> Int64s:
    """Read and check the token ids of one request. Raises BatchError."""
    if isinstance(tokens, Tensor):
        if tokens.device.type == "meta":
            raise BatchError(f"the tokens of {sequence!r} are a meta tensor and have no values; give real token ids")
        if tokens.dtype.is_floating_point or tokens.dtype.is_complex:
            # Such tensors are refused here, because numpy has no bfloat16.
            raise _not_integers(sequence, tokens, vocab_size)
        tokens = tokens.detach().cpu().numpy()
    try:
        ids = np.asarray(tokens)
    except ValueError as error:
        raise BatchError(f"tokens of {sequence!r} are ragged: {tokens!r}; give a flat list of token ids") from error
    if ids.size == 0:
        raise BatchError(f"the request of {sequence!r} has no tokens; leave it out of the step")
    if ids.ndim > 1:
        raise BatchError(f"tokens of {sequence!r} have shape {ids.shape}; give one axis, one request a sequence")
    if ids.dtype.kind not in "iu":
        raise _not_integers(sequence, tokens, vocab_size)
    ids = ids.reshape(-1)
    _require_in_vocabulary(ids if soft is None else ids[ids < FIRST_SOFT_ID], sequence, vocab_size)
    return ids.astype(np.int64)


def _require_in_vocabulary(ids: NDArray[np.integer[Any]], sequence: Sequence, vocab_size: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise BatchError(f"token {bad} of {sequence!r} is outside the vocabulary: 0 <= id < {vocab_size}")


def read_saved_ids(tokens: ArrayLike, vocab_size: int, soft: SoftTokens | None) -> Int64s:
    """Return the token ids of a file, (n,). Raises ValueError if one is no token of this memory's model."""
    ids = np.asarray(tokens, np.int64).ravel()
    plain = ids if soft is None else ids[ids < FIRST_SOFT_ID]
    if len(plain) and not 0 <= plain.min() <= plain.max() < vocab_size:
        raise ValueError(f"token ids {plain.min()} ... {plain.max()} are not in a vocabulary of {vocab_size}")
    return ids


def _not_integers(sequence: Sequence, tokens: Tokens, vocab_size: int) -> BatchError:
    return BatchError(f"tokens of {sequence!r} are {tokens!r}: {why_no_ids(tokens, vocab_size)}")


def why_no_ids(tokens: object, vocab_size: int) -> str:
    """Return the text of an error: why something is no list of token ids, and what to give instead."""
    if isinstance(tokens, Mapping) and "input_ids" in tokens:
        return "what a tokenizer returns has the ids as its ['input_ids']; give those"
    if isinstance(tokens, Set):
        return "a set has no order; give a list of token ids"
    parts = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
    for part in parts if isinstance(parts, list | tuple) else [parts]:
        if isinstance(part, str | bytes):
            return "that is text; encode it with the model's tokenizer first"
        if is_integer(part) and not 0 <= part < vocab_size:
            return f"{part} is outside the vocabulary: 0 <= id < {vocab_size}"
    return "not integers; give integer token ids"


def pack(tokens: TokenLists, slots: Int64s, starts: Int64s, peaks: Int64s) -> Packed:
    """Pack requests for a step, short ones first. Those of equal lengths stay in the caller's order.

    Args:
        slots, starts, peaks: (S,) one number for each sequence, in the same order. `starts` are the lengths before the
            step.
    """
    n = len(slots)
    # With one token for each request, the lines below would give the same result, but nothing needs sorting.
    if len(tokens.flat) == n:
        return Packed(slots, starts, np.arange(n + 1), np.maximum(peaks, starts + 1), tokens.flat, starts, np.arange(n))
    order = np.argsort(tokens.counts, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(n)
    starts, counts, from_ends = starts[order], tokens.counts[order], tokens.ends[order]
    ends = starts + counts
    return Packed(
        slots=slots[order],
        starts=starts,
        cu_seqlens=starts_of(counts),
        peaks=np.maximum(peaks[order], ends),
        token_ids=tokens.flat[ranges(from_ends - counts, from_ends)],
        positions=ranges(starts, ends),
        place=place,
    )


def requests_of(packed: Packed, chosen: Int64s) -> tuple[Packed, Int64s]:
    """Return a step with only the requests `chosen` (s,), which ascend, and the packed indices (t,) of their tokens."""
    tokens = ranges(packed.cu_seqlens[:-1][chosen], packed.cu_seqlens[1:][chosen])
    return Packed(
        slots=packed.slots[chosen],
        starts=packed.starts[chosen],
        cu_seqlens=starts_of(packed.counts[chosen]),
        peaks=packed.peaks[chosen],
        token_ids=packed.token_ids[tokens],
        positions=packed.positions[tokens],
        place=np.arange(len(chosen)),
    ), tokens


def output_rows(packed: Packed, outputs: str | tuple[int, ...]) -> Int64s:
    """Return the packed row of each output, in the caller's order.

    Outputs are those of the last token of each request, of all tokens, or of so many last tokens of each request.
    """
    starts, ends = packed.cu_seqlens[:-1][packed.place], packed.cu_seqlens[1:][packed.place]
    if outputs == "last":
        return ends - 1
    return ranges(starts if outputs == "all" else ends - np.array(outputs, np.int64), ends)


def check_row_counts(outputs: object, counts: Int64s) -> None:
    """Raise BatchError unless `outputs` says for each request of a step how many of its last tokens have outputs."""
    given = outputs if isinstance(outputs, tuple) and len(outputs) == len(counts) else (None,) * len(counts)
    if not all(is_integer(n, 1) and n <= most for n, most in zip(given, counts, strict=True)):
        raise BatchError(
            f"outputs={outputs!r}; choose 'last' (one row a request), 'all' (one row a token), or a tuple with a "
            f"number for each of the {len(counts)} requests, from 1 to the number of its tokens"
        )


def row_counts(outputs: str | tuple[int, ...], counts: Int64s) -> list[int]:
    """Return how many rows of outputs each request of a step has, given its numbers of tokens."""
    if isinstance(outputs, tuple):
        return [*outputs]
    return counts.tolist() if outputs == "all" else [1] * len(counts)
