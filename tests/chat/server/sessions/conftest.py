"""Makes the server whose stored responses the tests of this folder read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions
from hybridmem.models import LanguageModel
from tests.chat.servers import Running, running


@pytest.fixture(scope="module")
def server(embedded: LanguageModel, tokenizer: Tokenizer) -> Iterator[Running]:
    with running(embedded, tokenizer, ServerOptions(default_tokens=32, isolate=True)) as server:
        yield server
        server.settle()
        assert 'code="500"' not in server.call("GET", "/metrics").body.decode()
