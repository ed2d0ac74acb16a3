"""Makes models and the tokenizer that the tests of `chat` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridmem.chat.prompts import Tokenizer, load_tokenizer
from hybridmem.models import EMBEDDED, LanguageModel, load_model
from tests.chat.servers import Running, running
from tests.subjects import make_subject


@pytest.fixture(scope="session", params=("toy-window", "jamba", "mamba"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Return models with attention and recurrences, with and without a window, or with recurrences alone."""
    return make_subject(request.param, tmp_path_factory.mktemp(request.param)).model


@pytest.fixture(scope="session")
def embedded() -> LanguageModel:
    return load_model("embedded")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Return the tokenizer of the embedded model."""
    return load_tokenizer(EMBEDDED)


@pytest.fixture(scope="session")
def plain_server(embedded: LanguageModel, tokenizer: Tokenizer) -> Iterator[Running]:
    """Return a server of the embedded model with default options."""
    with running(embedded, tokenizer) as server:
        yield server
