"""Steps verify drafts. The tests say which rows run again after tokens were rejected, and which bytes steps hold."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from hybridmem.memory import HybridMemory, Sequence
from tests.memory.state.test_tails import DRY, HOST, N_RECURRENCES, counted_rows, feed, make

Mode = Literal["keep", "replay"]
FOLDS = pytest.mark.parametrize("fold", ["keep", "replay"])
WINDOW = 16


def behind_a_draft(fold: Mode, n_fed: int, n_kept: int) -> tuple[HybridMemory, Sequence]:
    """Return a sequence of 21 tokens, to which a draft was then fed twice. Some tokens of each draft were kept."""
    memory = make(HOST, WINDOW, fold)
    sequence = memory.open()
    feed(memory, {sequence: [3] * 21})
    for _ in range(2):
        feed(memory, {sequence: [5] * n_fed}, {sequence: n_kept})
    return memory, sequence


def outputs_of(tokens: list[int], n_last: int) -> Any:
    memory = make(HOST, WINDOW)
    return feed(memory, {memory.open(): tokens})[-n_last:]


@FOLDS
@pytest.mark.parametrize("n_fed, n_kept", [(5, 1), (5, 2), (4, 3)])
@pytest.mark.parametrize("n_next", [1, 4])
def test_only_accepted_rows_run_again(fold: Mode, n_fed: int, n_kept: int, n_next: int) -> None:
    """The other rows since the last fold point do not."""
    memory, sequence = behind_a_draft(fold, n_fed, n_kept)
    with counted_rows() as rows:
        found = feed(memory, {sequence: [6] * n_next})
    assert sum(rows) == N_RECURRENCES * (n_kept + n_next)
    torch.testing.assert_close(found, outputs_of([3] * 21 + [5] * (2 * n_kept) + [6] * n_next, n_next))


@FOLDS
def test_no_row_runs_again_if_all_are_accepted(fold: Mode) -> None:
    memory, sequence = behind_a_draft(fold, 2, 2)  # The next step passes no fold point.
    with counted_rows() as rows:
        feed(memory, {sequence: [6]})
    assert sum(rows) == N_RECURRENCES


@FOLDS
def test_a_rejected_draft_changes_no_fork_and_no_checkpoint(fold: Mode) -> None:
    """The head is shared then, so it is neither moved nor overwritten."""
    memory, sequence = behind_a_draft(fold, 4, 2)
    fork, mark = memory.fork(sequence), memory.checkpoint(sequence)
    text = [3] * 21 + [5] * 4
    for token in (1, 2):
        feed(memory, {sequence: [token] * 4}, {sequence: 1})
    torch.testing.assert_close(feed(memory, {sequence: [6]}), outputs_of([*text, 1, 2, 6], 1))
    torch.testing.assert_close(feed(memory, {fork: [6]}), outputs_of([*text, 6], 1))
    memory.rollback(sequence, to=mark)
    torch.testing.assert_close(feed(memory, {sequence: [4]}), outputs_of([*text, 4], 1))


@FOLDS
@pytest.mark.parametrize("is_behind_a_draft", [False, True])
def test_an_aborted_draft_leaves_the_sequence_as_it_was(fold: Mode, is_behind_a_draft: bool) -> None:
    memory, sequence = behind_a_draft(fold, 4, 2 if is_behind_a_draft else 4)
    text = [3] * 21 + [5] * (4 if is_behind_a_draft else 8)
    with pytest.raises(KeyError), memory.step({sequence: [1] * 4}, outputs="all") as step:
        HOST(step)
        raise KeyError
    memory.check()
    with memory.step({sequence: [1] * 4}, outputs="all") as step:
        HOST(step)
        step.accept({sequence: 0})
    memory.check()
    torch.testing.assert_close(feed(memory, {sequence: [6]}), outputs_of([*text, 6], 1))


def used_by_steps(memory: HybridMemory, outputs: Literal["last", "all"]) -> tuple[int, int]:
    """Return the most bytes used in steps of three tokens, of which one is kept, and the most used between steps."""
    sequence, inside, between = memory.open(), 0, 0
    for _ in range(40):
        with memory.step({sequence: [1] * 3}, outputs=outputs) as step:
            inside = max(inside, memory.counters.used_bytes)
            step.accept({sequence: 1})
        memory.check()
        between = max(between, memory.counters.used_bytes)
    return inside, between


@FOLDS
def test_drafts_need_no_larger_budget(fold: Mode) -> None:
    """A step takes one state more if there is room. Between steps, nothing more is held."""
    inside, between = used_by_steps(make(DRY, WINDOW, fold), "last")
    most_inside, most_between = used_by_steps(make(DRY, WINDOW, fold), "all")
    assert most_between == between
    assert most_inside > inside
    assert used_by_steps(make(DRY, WINDOW, fold, budget=inside), "all") == (inside, between)
