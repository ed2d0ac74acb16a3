"""Models and the tokenizer that the tests of `chat` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridmem.chat.prompts import Tokenizer, load_tokenizer
from hybridmem.models import EMBEDDED, LanguageModel, load_model
from tests.chat.servers import Running, running
from tests.subjects import make_subject


@pytest.fixture(scope="session", params=("toy-window", "jamba", "mamba"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Attention and recurrences, with and without a window, and recurrences alone; they have no tokenizer."""
    return make_subject(request.param, tmp_path_factory.mktemp(request.param)).model


@pytest.fixture(scope="session")
def embedded() -> LanguageModel:
    return load_model("embedded")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Of the embedded model."""
    return load_tokenizer(EMBEDDED)


@pytest.fixture(scope="session")
def plain_server(embedded: LanguageModel, tokenizer: Tokenizer) -> Iterator[Running]:
    """The embedded model behind HTTP, with nothing that is said otherwise."""
    with running(embedded, tokenizer) as server:
        yield server
