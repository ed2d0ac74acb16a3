"""Lets pytest check each promise of each subject.

The options are those of `pytest --pyargs hybridmem.memory.testing --subject MODULE:FACTORY`.
"""

from __future__ import annotations

from typing import Any

import pytest

from hybridmem.memory.testing.adapter import Factory
from hybridmem.memory.testing.checking import allowed_refusals, check, load_factory, may_refuse
from hybridmem.memory.testing.promises import PROMISES
from hybridmem.memory.testing.subjects import REFUSED, all_subjects


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrize the test with each subject that the command line names."""
    names = metafunc.config.getoption("subject")
    try:
        subjects = {name: load_factory(name) for name in names} if names else all_subjects()
        allowed = allowed_refusals(metafunc.config.getoption("allow_refused"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    own = {} if names else REFUSED
    chosen = [(factory, allowed | own.get(name, frozenset())) for name, factory in subjects.items()]
    metafunc.parametrize(("factory", "allowed"), chosen, ids=subjects.keys())
    metafunc.parametrize("promise", PROMISES)


def test_a_promise_is_kept(factory: Factory, allowed: frozenset[str], promise: str, pytestconfig: Any) -> None:
    """Fail if the promise is broken, or is refused although it must be kept. Skip if it may be refused, and is."""
    seed, n_examples = pytestconfig.getoption("subject_seed"), pytestconfig.getoption("subject_examples")
    (result,) = check(factory, [promise], seed=seed, n_examples=n_examples)
    if result.verdict == "refused" and may_refuse(result.promise, allowed):
        pytest.skip(result.why)
    assert result.verdict != "refused", f'refused (--allow-refused "{promise}"): {result.why}'
    assert result.verdict == "passed", f"seed {result.seed}: {result.why}"
