"""Holds shared fixtures.

A tested memory is poisoned: fresh and freed blocks are NaN, so a read of unwritten bytes shows.
"""

from __future__ import annotations

import gc
import os
import random
import secrets
import signal
import sys
from collections.abc import Iterator

import pytest
import xdist
from hypothesis import HealthCheck, settings

from tests.extent import left_out, pick

# Bytecode is kept even where the environment forbids it, as in containers. Otherwise each process that tests start
# compiles every file of the library that it imports, which takes six seconds for all files.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Nearly all objects that are made while tests are collected live until the process ends.
_THRESHOLD = gc.get_threshold()
gc.set_threshold(2_000_000)

settings.register_profile(
    "ci",
    max_examples=pick(5, 50),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    database=None,
)
settings.register_profile("long", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compute with one thread, because the models are tiny.

    A second thread only waits, on a busy machine for long. Kernels use torch's number of threads. The process that
    hands tests to workers imports nothing heavy, because the workers start after it.
    """
    if not xdist.is_xdist_controller(session):
        import torch

        torch.set_num_threads(1)
    if xdist.is_xdist_worker(session):
        # There is already a worker for each core, so each worker compiles alone. A helper would take seconds to import
        # torch.
        from hybridmem.memory.kernels.cpu import warm_up

        sys.modules[warm_up.__module__]._n_cores = lambda: 1  # type: ignore[attr-defined]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another run tries, and let the longest test begin first, so that in the end no worker waits long.

    With a cold cache, one worker compiles numba's kernels while another runs Triton's interpreter, which needs none of
    them.
    """
    if not any("[" in argument for argument in config.args):  # A case that is named in full is tried.
        others = left_out(items)
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    items.sort(key=lambda item: item.path.name != "test_interpreted.py")


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed all draws, so that they are the same in every run, even for requests that name no seed."""
    import torch

    # torch.manual_seed would do the same, but it formats the stack for each kind of device that is not in use. That
    # takes three milliseconds in each test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    drawn = random.Random(0)
    monkeypatch.setattr(secrets, "randbits", drawn.getrandbits)
    monkeypatch.setattr(secrets, "randbelow", drawn.randrange)


def pytest_collection_finish() -> None:
    """Freeze modules and tests, which live to the end, so that garbage collections need not visit them."""
    gc.set_threshold(*_THRESHOLD)
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # Extensions write pages about what they find alive at the exit.


@pytest.fixture(autouse=True)
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore garbage collection after a command, because commands freeze live objects and collect less often.

    In one process with all other tests, what was garbage at that moment would never be freed, memories among it.
    """
    monkeypatch.setattr(gc, "freeze", lambda: None)
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.fixture(autouse=True)
def same_handler() -> Iterator[None]:
    """Check that a call neither holds a Ctrl-C back nor restores an old handler once it has returned.

    If SIGINT was ignored, other libraries may leave Python's own handler.
    """
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) in (before, signal.default_int_handler), "a test has left another handler"
