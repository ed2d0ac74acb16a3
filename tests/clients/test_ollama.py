"""Talks to the server with Ollama's own client."""

from __future__ import annotations

import asyncio
import json

import ollama
import pytest

PACKAGE = "ollama"
MODEL = "embedded"
CAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "My cat is called Zoe."}]


@pytest.fixture
def client(url: str) -> ollama.Client:
    return ollama.Client(host=url.removesuffix("/v1"))


def test_chat(client: ollama.Client, url: str) -> None:
    """chat, whole, as a stream, and asynchronous."""
    reply = client.chat(MODEL, CAT)
    assert reply.message.content and reply.done and reply.eval_count > 0
    assert "".join(part.message.content for part in client.chat(MODEL, CAT, stream=True))

    async def ask() -> ollama.ChatResponse:
        return await ollama.AsyncClient(host=url.removesuffix("/v1")).chat(MODEL, CAT)

    assert asyncio.run(ask()).message.content


def test_tools(client: ollama.Client) -> None:
    """tools of functions, and their results."""

    def look(far: bool) -> str:
        """Look.

        Args:
            far: how far.
        """
        return "a dog"

    call = {"function": {"name": "look", "arguments": {"far": True}}}
    messages = [*CAT, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": look(True)}]
    assert client.chat(MODEL, messages, tools=[look]).message.content


def test_generate(client: ollama.Client) -> None:
    """generate, with a schema, and a raw prompt."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert "a" in json.loads(client.generate(MODEL, "My cat", format=schema).response)
    assert client.generate(MODEL, "My cat", raw=True, options={"num_predict": 3}).done_reason in ("stop", "length")


def test_models(client: ollama.Client) -> None:
    """list, show and ps."""
    assert [model.model for model in client.list().models] == [model.model for model in client.ps().models] == [MODEL]
    assert client.show(MODEL).modelinfo["jamba.context_length"] > 0
    with pytest.raises(ollama.ResponseError) as raised:
        client.show("another")
    assert raised.value.status_code == 404
