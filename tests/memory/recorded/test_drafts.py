"""Steps that verify drafts of one sequence are replayed, although different numbers of their tokens are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extent import few_cases
from tests.memory.recorded.test_model import Twins
from tests.subjects import make_subject


@few_cases
@pytest.mark.parametrize("name", ["toy", "toy replay", "family:mamba1 defer", "model:mamba2", "model:lfm2"])
def test_drafts_are_replayed(name: str, tmp_path: Path) -> None:
    """The bits are those of the model, and most steps with drafts do not run it."""
    twins = Twins(make_subject(name, tmp_path), 1)
    twins.memories = [twins.subject.memory(24, budget="4MiB") for _ in range(2)]
    twins.sequences = [[memory.open()] for memory in twins.memories]
    twins.feed({0: 9})

    def verify(n_rounds: int) -> int:
        """Return how many steps ran the model."""
        n_before = twins.counted.n_runs
        for i in range(n_rounds):
            twins.feed({0: 3}, accept={0: 1 + i % 3})
        twins.check()
        return twins.counted.n_runs - n_before

    verify(60)
    assert verify(24) <= 6, "those that fold, and those whose layout was not recorded yet"
