"""Talks to the server with Ollama's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import ollama
import pytest
from scripts import GO_ON, LOOKS, TOO_LONG, ScriptedServer, cancel_task  # type: ignore[import-not-found]

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


def test_a_loop(scripted: ScriptedServer, look: Callable[[str], str], looked: list[str]) -> None:
    """a loop with two tools, with a restart of the server in the middle."""
    client, messages = ollama.Client(host=scripted.url), [{"role": "user", "content": LOOKS}]
    while (message := client.chat(MODEL, messages, tools=[look]).message).tool_calls:
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "content": look(**call.function.arguments), "tool_name": "look"})
    assert message.content == "All is done." and looked == ["here", "there"]


def test_cancel(scripted: ScriptedServer) -> None:
    """a cancelled chat."""
    cancel_task(ollama.AsyncClient(host=scripted.url).chat(MODEL, [{"role": "user", "content": GO_ON}]), scripted)


def test_overflow(client: ollama.Client) -> None:
    """a prompt that is too long."""
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.chat(MODEL, [{"role": "user", "content": TOO_LONG}])
