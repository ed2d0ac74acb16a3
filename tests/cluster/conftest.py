"""The embedded model is loaded once."""

from __future__ import annotations

import pytest

from hybridmem.models import LanguageModel, load_model


@pytest.fixture(scope="session")
def embedded() -> LanguageModel:
    return load_model("embedded")
