"""One Ray with one fleet serves all tests, because starting it takes longer than running them.

These tests need the extra: pip install -e ".[dev,dev-cluster]", then python -m pytest -n 0 tests/ray. With
CLUSTER_STORE=s3 the fleet keeps its sequences in a bucket, and all tests run against that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hybridmem.cluster.commands.serve import fleet
from tests.ray.fleets import fleet_options, free_port
from tests.ray.stores import Bucket, Folder, TestedStore


def pytest_configure(config: pytest.Config) -> None:
    for ignored in ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"):
        # These warnings are of Ray, moto and botocore, and nobody here can mend them.
        config.addinivalue_line("filterwarnings", ignored)


@pytest.fixture(scope="session")
def bucket() -> Iterator[Bucket]:
    """Return a bucket of an S3 server on this machine."""
    bucket = Bucket(free_port())
    yield bucket
    bucket.close()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TestedStore:
    """Return the place in which the fleet keeps sequences."""
    if os.environ.get("CLUSTER_STORE") == "s3":
        return request.getfixturevalue("bucket")  # type: ignore[no-any-return]
    return Folder(tmp_path_factory.mktemp("fleet") / "store")


@pytest.fixture(scope="session")
def url(store: TestedStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of two replicas of the embedded model."""
    port = free_port()
    sessions = str(tmp_path_factory.mktemp("sessions"))  # `serve --replicas 2` gives these options.
    options = fleet_options(
        replicas=2, cpus=0.5, budget="64MiB", store=store.url, lease=5.0, grace=2.0, sessions=sessions, prefix_bytes="0"
    )
    with fleet(options, "127.0.0.1", port):
        yield f"http://127.0.0.1:{port}"
