"""A soak counts what it did, leaves nothing behind, and notices a sequence that is not as if computed alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from benchmarks import soak
from hybridmem.memory import Step
from hybridmem.memory.testing import HybridAdapter, subjects
from tests.extent import only_in_long


@only_in_long
def test_a_round_of_a_sound_memory(tmp_path: Path) -> None:
    tally = soak.Tally()
    soak.Round("hybrid", 0, tally, tmp_path).run()
    assert tally.mismatches == [] and tally.leaked_bytes == 0 and tally.n_replayed >= 10
    assert len(tally.operations) >= 12 and len(tally.seconds) > 100


@only_in_long
def test_what_differs_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(**options: object) -> HybridAdapter:
        adapter = subjects.hybrid(**options)  # type: ignore[arg-type]
        model, n_steps = adapter.model, [0]

        def run(step: Step) -> Tensor:
            n_steps[0] += 1
            logits: Tensor = model(step)
            return logits + n_steps[0]  # The output depends on what other sequences did.

        adapter.model = run
        return adapter

    monkeypatch.setitem(soak.KINDS, "hybrid", forgetful)
    tally = soak.Tally()
    soak.Round("hybrid", 0, tally, tmp_path).run()
    assert tally.mismatches
