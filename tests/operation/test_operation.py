"""The tests run two seeds of simulated operation, in which every kind of event happens.

`OPERATION_SEEDS=5000` makes a long run.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.extent import only_in_long
from tests.operation.runs import EXPECTED, SIMULATIONS

FIRST, N_SEEDS = 3, int(os.environ.get("OPERATION_SEEDS", "2"))


@only_in_long
@pytest.mark.parametrize("what", SIMULATIONS)
def test_everybody_gets_what_they_would_get_alone_or_a_whole_error(what: str) -> None:
    events = Counter[str]()
    for seed in range(FIRST, FIRST + N_SEEDS):
        events += SIMULATIONS[what](seed)
    assert events.keys() >= EXPECTED[what]
