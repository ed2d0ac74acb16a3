"""The promises of `memory.testing` hold for every subject. The kit checks any memory, and ours comes first."""

from __future__ import annotations

import os

import pytest

from hybridmem.memory.specs import IndexSpec
from hybridmem.memory.testing import PROMISES, HybridAdapter, check
from tests.conformance.test_rollback import WINDOW
from tests.subjects import IS_FULL, Subject

N_EXAMPLES = int(os.environ.get("PROMISES", 20 if IS_FULL else 1))
"""Histories of each promise and subject; `PROMISES=50` makes more."""


TREES = "a path of a tree is as if it alone had been fed"
"""The promise that memories may refuse if old rows are evicted, rounded or chosen."""


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_of_the_kit_is_kept(subject: Subject, promise: str) -> None:
    is_on_host = subject.spec.device.type == "cpu"

    def make() -> HybridAdapter:
        same_bits = subject.is_exact and subject.fold == "keep" and is_on_host
        return HybridAdapter(
            subject.model, subject.spec, same_bits=same_bits, rollback_window=WINDOW, fold=subject.fold
        )

    (result,) = check(make, [promise], n_examples=N_EXAMPLES)
    forgets = subject.policy is not None or subject.storage is not None
    chooses = any(isinstance(memory, IndexSpec) for layer in subject.spec.layers for memory in layer)
    is_refused = (promise == TREES and (forgets or chooses)) or PROMISES[promise].is_optional
    expected = "refused" if is_refused else "passed"
    assert result.verdict == expected, result.why
