"""The gateway reads the same tokens and the same owner from a request as a replica's server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import load_tokenizer
from hybridmem.chat.server.app import make_app
from hybridmem.cluster.serving.asgi import lifespan_of, messages_of
from hybridmem.cluster.serving.reading import PromptReader, session_of
from hybridmem.cluster.serving.request import ForwardedRequest
from hybridmem.memory import HybridMemory
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import EMBEDDED, LanguageModel

CHAT = {"messages": [{"role": "user", "content": "My cat is called Zoe <|end|>."}], "max_tokens": 2}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "prompt_cache_key": "me", "cache_salt": "mine"}),
    (
        "/v1/chat/completions",
        {
            "messages": [*CHAT["messages"], {"role": "assistant", "content": "Okay"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "max_tokens": 2,
        },
    ),
    ("/v1/messages", {**CHAT, "system": "Be brief.", "stream": True}),
    ("/v1/completions", {"prompt": "My dog is called Rex", "max_tokens": 2}),
    ("/v1/completions", {"prompt": [5, 6, 7, 8, 9], "max_tokens": 2}),
]


def request_of(path: str, body: dict[str, Any], **headers: str) -> ForwardedRequest:
    head = {"content-type": "application/json", "host": "localhost", "authorization": "Bearer x", **headers}
    pairs = tuple((name.replace("_", "-").encode(), value.encode()) for name, value in head.items())
    return ForwardedRequest("POST", path, b"", pairs, None, json.dumps({"model": "embedded", **body}).encode())


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_tokens_and_owner_are_those_of_the_server(embedded: LanguageModel, path: str, body: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(EMBEDDED)
    memory = HybridMemory(embedded.memory_spec, "8MiB", rollback_window=0)
    cache = PrefixCache(memory)
    app = make_app(Engine(embedded, memory, tokenizer, prefixes=cache), tokenizer, "embedded")
    request = request_of(path, body)

    async def run() -> Any:
        reader = PromptReader(tokenizer, parse_special=False, max_requests=8)
        async with lifespan_of(app):
            async for _ in messages_of(app, request.scope(), request.body):
                pass
            prompt = (await reader.read(request)).prompt
            reader.close()
            return prompt, cache.checkpoints_of(prompt.array(), prompt.owner)

    prompt, marks = asyncio.run(run())
    assert [mark.length for mark in marks] == [prompt.n_tokens]
    assert np.array_equal(marks[0].tokens, prompt.array())


def test_sessions_are_named_by_header_or_body_and_belong_to_a_key() -> None:
    named = request_of("/v1/responses", {"previous_response_id": "resp_1"}, x_session_id="mine")
    assert session_of(named, None) != session_of(request_of("/v1/responses", {}), None) is None
    other = ForwardedRequest("POST", "/", b"", ((b"x-session-id", b"mine"), (b"authorization", b"Bearer y")), None, b"")
    assert session_of(named, "resp_1") == session_of(named, None) != session_of(other, None)
