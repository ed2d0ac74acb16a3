"""Makes models and the tokenizer that the tests of `chat` share."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import pytest
import torch

from hybridmem.chat.prompts import Tokenizer, load_tokenizer
from hybridmem.models import EMBEDDED, LanguageModel, load_model
from tests.chat.servers import Running, running
from tests.subjects import make_subject


@pytest.fixture(scope="session", params=("toy-window", "jamba", "mamba"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Return models with attention and recurrences, with and without a window, or with recurrences alone."""
    return make_subject(request.param, tmp_path_factory.mktemp(request.param)).model


@pytest.fixture(scope="module")
def single_thread() -> Iterator[None]:
    """Compute with one thread, because the model is tiny.

    Threads gain nothing. On a busy machine they wait for each other, which takes 50 times as long.
    """
    n_torch, n_numba = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
    torch.set_num_threads(n_torch)
    numba.set_num_threads(n_numba)


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
