"""Lets pytest check each promise of each subject: `pytest --pyargs memory.testing --subject MODULE:FACTORY`."""

from __future__ import annotations

from typing import Any

import pytest

from memory.testing.adapter import Factory
from memory.testing.checking import check, load_factory
from memory.testing.promises import PROMISES
from memory.testing.subjects import all_subjects


def pytest_generate_tests(metafunc: Any) -> None:
    """Take each subject that the command line names."""
    names = metafunc.config.getoption("subject")
    subjects = {name: load_factory(name) for name in names} if names else all_subjects()
    metafunc.parametrize("factory", subjects.values(), ids=subjects.keys())
    metafunc.parametrize("promise", PROMISES)


def test_a_promise_is_kept(factory: Factory, promise: str, pytestconfig: Any) -> None:
    """Fails if the promise is broken; skips if the memory refuses what it is about."""
    seed, n_examples = pytestconfig.getoption("subject_seed"), pytestconfig.getoption("subject_examples")
    (result,) = check(factory, [promise], seed=seed, n_examples=n_examples)
    if result.verdict == "refused":
        pytest.skip(result.why)
    assert result.verdict == "passed", f"seed {result.seed}: {result.why}"
