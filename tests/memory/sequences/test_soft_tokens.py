"""The tests say what ids of the table of soft tokens mean, how long rows stay, and what is refused."""

from __future__ import annotations

import copy
import gc
import hashlib

import numpy as np
import pytest
import torch

from hybridmem.memory import BatchError, SoftTokens, SpecError
from hybridmem.memory.sequences import is_soft, passages_in, plain_ids
from hybridmem.memory.sequences.soft_tokens import MOST_ROWS, positions_back


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def rows(n: int) -> torch.Tensor:
    return torch.arange(4.0 * n).view(n, 4)


def test_ids_follow_from_content_alone() -> None:
    first, again, other = (SoftTokens(0).add(digest(text), rows(5)) for text in ("a", "a", "b"))
    assert np.array_equal(first.token_ids, again.token_ids)
    assert not set(first.token_ids.tolist()) & set(other.token_ids.tolist())
    assert all(map(is_soft, first.token_ids.tolist())) and plain_ids([3, *first.token_ids.tolist(), 4]) == [3, 4]
    assert [first.row_of(int(id)) for id in first.token_ids] == [0, 1, 2, 3, 4]


def test_the_last_id_says_how_far_text_moves_back() -> None:
    table = SoftTokens(0, n_axes=2)
    passage = table.add(digest("a"), rows(6), [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]], 3)
    assert positions_back(np.array([7, *passage.token_ids, 7])).tolist() == [0] * 6 + [3, 0]


def test_passages_are_found_by_what_their_last_ids_say() -> None:
    table = SoftTokens(0, n_axes=2)
    a, b = (table.add(digest(text), rows(4), [[0, 0, 1, 1], [0, 1, 0, 1]], 2).token_ids.tolist() for text in "ab")
    assert list(passages_in([7, *a, *b, 8, *b[2:]])) == [(1, 5, 2), (5, 9, 2), (10, 12, 0)]


def test_a_passage_may_stand_at_an_earlier_position_and_take_none() -> None:
    table = SoftTokens(0, n_axes=2)
    passage = table.add(digest("a"), rows(1), [[-3], [-3]], 0)
    assert positions_back(passage.token_ids).tolist() == [1]
    again = SoftTokens(0, n_axes=2).restore(passage.digest, passage.rows, passage.offsets, passage.back, None)
    assert np.array_equal(again.token_ids, passage.token_ids)
    with pytest.raises(SpecError, match="n_positions=0 for 1 rows at 0"):
        table.add(digest("b"), rows(1), [[0], [0]], 0)


def test_runs_are_found_wherever_they_are_cut() -> None:
    table = SoftTokens(0)
    a, b = table.add(digest("a"), rows(5)), table.add(digest("b"), rows(3))
    ids = np.concatenate([a.token_ids[2:], [9], b.token_ids, a.token_ids[:2], a.token_ids[4:]])
    found = [(run.at, run.row, run.n, run.passage) for run in table.runs(ids)]
    assert found == [(0, 2, 3, a), (4, 0, 3, b), (7, 0, 2, a), (9, 4, 1, a)]


def test_rows_stay_while_somebody_holds_them_and_the_last_ones_beyond() -> None:
    table = SoftTokens(0, kept_bytes=2 * rows(5).nbytes)
    held = table.add(digest("held"), rows(5))
    for name in "abc":
        table.add(digest(name), rows(5))
    gc.collect()
    assert [table.find(digest(name)) is not None for name in ("c", "b", "a", "held")] == [True, True, False, True]
    assert table.add(digest("held"), rows(5)) is held
    with pytest.raises(BatchError, match="give the picture again"):
        table.held(SoftTokens(0).add(digest("a"), rows(5)).token_ids)


def test_a_copy_of_a_table_is_empty() -> None:
    table = SoftTokens(7, n_axes=3, kept_bytes=5)
    table.add(digest("a"), rows(1), [[0], [0], [0]], 1)
    twin = copy.deepcopy(table)
    assert (twin.placeholder_id, twin.n_axes, twin.kept_bytes, twin.find(digest("a"))) == (7, 3, 5, None)


@pytest.mark.parametrize(
    "arguments, why",
    [
        ((b"short", rows(3)), "16 bytes or more"),
        ((digest("a"), torch.zeros(3)), "tensor"),
        ((digest("a"), torch.zeros(MOST_ROWS, 1)), "0 < N <"),
        ((digest("a"), rows(3)), "positions=None"),
        ((digest("a"), rows(3), [[0, 1, 2]], 3), "have shape"),
        ((digest("a"), rows(3), [[0, 1, 2], [0, 0, 0]], 2), "n_positions=2"),
        ((digest("a"), rows(3), [[0, 1, 2], [0, 0, 0]], 4), "n_positions=4"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[object, ...], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        SoftTokens(0, n_axes=2).add(*arguments)  # type: ignore[arg-type]
