"""Packing is compared with naive loops, and requests that can make no batch are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridmem.memory import AttentionSpec, BatchError, HybridMemory, MemorySpec, Sequence
from hybridmem.memory.blocks.arrays import ranges
from hybridmem.memory.sequences.batch import TokenLists, output_rows, pack, read_pairs, read_tokens

VOCAB = 10


@pytest.fixture
def sequences() -> list[Sequence]:
    memory = HybridMemory(MemorySpec(((AttentionSpec(1, 1, 4),),), VOCAB), "1MiB", device="meta")
    return [memory.open() for _ in range(3)]


def read_requests(requests: Any, vocab_size: int) -> tuple[list[Sequence], TokenLists]:
    """Run both halves of reading one after the other, as a step does."""
    sequences, values = read_pairs(requests)
    return sequences, read_tokens(sequences, values, vocab_size)


# The tests below pack.

request = st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=7), st.integers(0, 50), st.integers(0, 60))
"""Tokens, length so far, how much further the sequence has been."""


def as_arrays(
    requests: list[tuple[list[int], int, int]],
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    tokens = [np.array(t, np.int64) for t, _, _ in requests]
    starts = np.array([start for _, start, _ in requests])
    return tokens, np.arange(100, 100 + len(requests)), starts, starts + [extra for _, _, extra in requests]


@given(st.lists(request, min_size=1, max_size=9))
def test_packing_is_a_stable_sort_by_length(requests: list[tuple[list[int], int, int]]) -> None:
    tokens, slots, starts, peaks = as_arrays(requests)
    packed = pack(TokenLists.of(tokens), slots, starts, peaks)

    order = sorted(range(len(requests)), key=lambda i: len(tokens[i]))
    assert packed.slots.tolist() == [slots[i] for i in order]
    assert packed.starts.tolist() == [starts[i] for i in order]
    assert packed.counts.tolist() == [len(tokens[i]) for i in order]
    assert packed.ends.tolist() == [starts[i] + len(tokens[i]) for i in order]
    assert packed.peaks.tolist() == [max(peaks[i], starts[i] + len(tokens[i])) for i in order]
    assert packed.token_ids.tolist() == [token for i in order for token in tokens[i]]
    assert packed.positions.tolist() == [starts[i] + t for i in order for t in range(len(tokens[i]))]
    assert packed.cu_seqlens.tolist() == [sum(len(tokens[i]) for i in order[:n]) for n in range(len(order) + 1)]
    assert packed.place.tolist() == [order.index(i) for i in range(len(order))]
    arrays = (
        packed.slots,
        packed.starts,
        packed.cu_seqlens,
        packed.peaks,
        packed.token_ids,
        packed.positions,
        packed.place,
    )
    assert {array.dtype for array in arrays} == {np.dtype(np.int64)}


@given(st.lists(request, min_size=1, max_size=9))
def test_outputs_come_back_in_the_callers_order(requests: list[tuple[list[int], int, int]]) -> None:
    tokens, slots, starts, peaks = as_arrays(requests)
    packed = pack(TokenLists.of(tokens), slots, starts, peaks)
    expected_all = [
        (slot, start + t) for slot, start, own in zip(slots, starts, tokens, strict=True) for t in range(len(own))
    ]
    expected_last = [(slot, start + len(own) - 1) for slot, start, own in zip(slots, starts, tokens, strict=True)]
    row_of = list(zip(np.repeat(packed.slots, packed.counts), packed.positions, strict=True))
    assert [row_of[row] for row in output_rows(packed, "all")] == expected_all
    assert [row_of[row] for row in output_rows(packed, "last")] == expected_last


@given(st.lists(st.tuples(st.integers(-5, 50), st.integers(0, 6)), max_size=9))
def test_ranges_are_loops(intervals: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in intervals], np.int64)
    ends = starts + np.array([n for _, n in intervals], np.int64)
    assert ranges(starts, ends).tolist() == [i for start, n in intervals for i in range(start, start + n)]


# The tests below are about requests that are read.


@pytest.mark.parametrize(
    "tokens, expected",
    [
        (3, [3]),
        (np.int32(3), [3]),
        (np.uint8(3), [3]),
        ([0, 9], [0, 9]),
        ((1, 2), [1, 2]),
        (range(4), [0, 1, 2, 3]),
        ([np.int64(1), np.int32(2)], [1, 2]),
        (np.array([4, 5], np.int16), [4, 5]),
        (np.array(7), [7]),
        (torch.tensor([4, 5], dtype=torch.int32), [4, 5]),
        (torch.tensor([4, 5], dtype=torch.int64), [4, 5]),
        (torch.tensor(6), [6]),
        (torch.arange(8)[::3], [0, 3, 6]),
    ],
    ids=repr,
)
def test_tokens_are_read_whatever_holds_them(sequences: list[Sequence], tokens: Any, expected: list[int]) -> None:
    ((ids,), (sequence,)) = reversed(read_requests({sequences[0]: tokens}, VOCAB))
    assert sequence is sequences[0]
    assert ids.tolist() == expected and ids.dtype == np.int64 and ids.ndim == 1


def test_requests_keep_the_callers_order(sequences: list[Sequence]) -> None:
    a, b, c = sequences
    for requests in ({c: [1, 2], a: 3, b: [4]}, [(c, [1, 2]), (a, 3), (b, [4])], iter([(c, [1, 2]), (a, 3), (b, [4])])):
        found, tokens = read_requests(requests, VOCAB)
        assert found == [c, a, b]
        assert [t.tolist() for t in tokens] == [[1, 2], [3], [4]]


def test_the_callers_tokens_are_not_kept(sequences: list[Sequence]) -> None:
    given_tokens = np.array([1, 2])
    _, (ids,) = read_requests({sequences[0]: given_tokens}, VOCAB)
    given_tokens[0] = 5
    assert ids.tolist() == [1, 2]


# The tests below are about requests that are refused.


@pytest.mark.parametrize("requests", [{}, [], iter(())])
def test_no_requests_are_no_batch(requests: Any) -> None:
    with pytest.raises(BatchError, match="no requests"):
        read_requests(requests, VOCAB)


def test_a_sequence_may_occur_once(sequences: list[Sequence]) -> None:
    a, b, _ = sequences
    with pytest.raises(BatchError, match=f"{b!r} occurs in more than one request"):
        read_requests([(a, [1]), (b, [2]), (b, [3])], VOCAB)


@pytest.mark.parametrize("bad", ["ab", (1, [2]), 7, None, ()])
def test_what_is_no_pair_is_named(sequences: list[Sequence], bad: Any) -> None:
    with pytest.raises(BatchError) as caught:
        read_requests([(sequences[0], [1]), bad], VOCAB)
    assert repr(bad) in str(caught.value) and "no request" in str(caught.value)


@pytest.mark.parametrize(
    "tokens, named",
    [
        ([], "no tokens"),
        (np.zeros(0, np.int64), "no tokens"),
        (torch.zeros(0, dtype=torch.int64), "no tokens"),
        ([1.0, 2.5], "2.5"),
        (2.0, "2.0"),
        (np.array([0.5]), "0.5"),
        (torch.tensor([0.5]), "0.5"),
        (torch.tensor([0.5], dtype=torch.bfloat16), "0.5"),
        (True, "True"),
        ([True, False], "True, False"),
        (torch.tensor([True]), "True"),
        ("hello", "hello"),
        (["a", "b"], "'a', 'b'"),
        (None, "None"),
        ([None], "None"),
        ([1, "b"], "b"),
        ([[1, 2, 3]], "(1, 3)"),
        (np.zeros((2, 2), np.int64), "(2, 2)"),
        (torch.zeros(1, 1, dtype=torch.int64), "(1, 1)"),
        ([[1], [2, 3]], "[[1], [2, 3]]"),
        ([1, [2, 3]], "[1, [2, 3]]"),
        ([3, -1, -2], "-1"),
        (-7, "-7"),
        ([3, 10], "10"),
        (10**9, "1000000000"),
        (2**63 + 5, str(2**63 + 5)),
        ([2**70], str(2**70)),
        (torch.zeros(3, dtype=torch.int64, device="meta"), "meta"),
    ],
    ids=repr,
)
def test_bad_tokens_are_named_with_their_sequence(sequences: list[Sequence], tokens: Any, named: str) -> None:
    a, b, _ = sequences
    with pytest.raises(BatchError) as caught:
        read_requests({a: [1, 2], b: tokens}, VOCAB)
    assert named in str(caught.value) and repr(b) in str(caught.value)


def test_a_batch_error_is_a_value_error(sequences: list[Sequence]) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary: 0 <= id < 10"):
        read_requests({sequences[0]: 10}, VOCAB)
