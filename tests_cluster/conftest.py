"""One Ray with one fleet for all tests: it takes longer to start than all of them to run.

These tests need the extra: pip install -e ".[dev,dev-cluster]", then python -m pytest -n 0 tests_cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.commands.serve import fleet
from tests_cluster.fleets import fleet_options, free_port


def pytest_configure(config: pytest.Config) -> None:
    for ignored in ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"):
        config.addinivalue_line("filterwarnings", ignored)  # of Ray, which nobody here can mend


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the fleet keeps sequences."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def url(store: Path) -> Iterator[str]:
    """The address of two replicas of the embedded model."""
    port = free_port()
    options = fleet_options(replicas=2, cpus=0.5, budget="64MiB", store=str(store), lease=5.0, grace=2.0)
    with fleet(options, "127.0.0.1", port):
        yield f"http://127.0.0.1:{port}"
