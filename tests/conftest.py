"""Shared fixtures. Memory under test is poisoned: fresh and freed blocks are NaN, so whatever nobody wrote shows at once."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.subjects import SUBJECTS, Subject, make_subject

settings.register_profile("ci", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# These models are tiny: a second thread only waits, and on a busy machine it waits for long. Kernels follow torch.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Each model that the conformance suite runs on."""
    return make_subject(request.param, tmp_path_factory.mktemp(request.param))
