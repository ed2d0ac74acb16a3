"""Talks to the server with Anthropic's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from scripts import GO_ON, LOOKS, TOO_LONG, ScriptedServer  # type: ignore[import-not-found]

PACKAGE = "anthropic"
MODEL = "embedded"
CAT = [{"role": "user", "content": "My cat is called Zoe."}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WHERE = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
TOOLS = [{"name": name, "description": "d", "input_schema": PARAMETERS} for name in ("first", "second")]


@pytest.fixture
def client(url: str) -> Anthropic:
    return Anthropic(base_url=url.removesuffix("/v1"), api_key="none is needed", max_retries=0)


def test_messages(client: Anthropic, url: str) -> None:
    """messages, whole, as a stream, and asynchronous."""
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    reply = client.messages.create(model=MODEL, max_tokens=32, messages=CAT, system=system)
    assert reply.content[0].text and reply.stop_reason in ("end_turn", "max_tokens") and reply.usage.output_tokens > 0
    with client.messages.stream(model=MODEL, max_tokens=32, messages=CAT) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text != ""

    async def ask() -> str:
        async with AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none is needed") as other:
            return str((await other.messages.create(model=MODEL, max_tokens=32, messages=CAT)).content[0].text)

    assert asyncio.run(ask())


def test_tools(client: Anthropic) -> None:
    """a loop with two tools, whole and as a stream."""
    messages = list(CAT)
    for tool in TOOLS:
        asked = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": tool["name"]}}
        with client.messages.stream(model=MODEL, max_tokens=200, messages=messages, **asked) as stream:
            reply = stream.get_final_message()
        call = reply.content[-1]
        assert (reply.stop_reason, call.type, call.name) == ("tool_use", "tool_use", tool["name"])
        assert isinstance(call.input["a"], int)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
        content = [block.model_dump(exclude_none=True) for block in reply.content]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    reply = client.messages.create(model=MODEL, max_tokens=32, messages=messages, tools=TOOLS)
    assert reply.stop_reason in ("end_turn", "max_tokens")


def test_stop_sequences(client: Anthropic) -> None:
    """stop sequences."""
    greedy = {"temperature": 0}
    reply = client.messages.create(model=MODEL, max_tokens=64, messages=CAT, stop_sequences=[","], extra_body=greedy)
    assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == ("stop_sequence", ",", "Okay")


def test_counts(client: Anthropic) -> None:
    """count_tokens."""
    counted = client.messages.count_tokens(model=MODEL, messages=CAT)
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=CAT).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_overflow(client: Anthropic) -> None:
    """a prompt that is too long."""
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        client.messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": TOO_LONG}])


def test_models(client: Anthropic) -> None:
    """models."""
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="another", max_tokens=1, messages=CAT)


def test_a_loop(scripted: ScriptedServer, look: Callable[[str], str], looked: list[str]) -> None:
    """a restart of the server in the middle of a loop."""
    client = Anthropic(base_url=scripted.url, api_key="none is needed", max_retries=0)
    messages = [{"role": "user", "content": LOOKS}]
    asked = {"model": MODEL, "max_tokens": 200, "tools": [{"name": "look", "input_schema": WHERE}]}
    while (reply := client.messages.create(messages=messages, **asked)).stop_reason == "tool_use":
        calls = [block for block in reply.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": look(**call.input)} for call in calls]
        content = [block.model_dump(exclude_none=True) for block in reply.content]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    assert (looked, reply.content[-1].text) == (["here", "there"], "All is done.")


def test_cancel(scripted: ScriptedServer) -> None:
    """a cancelled stream."""
    client = Anthropic(base_url=scripted.url, api_key="none is needed", max_retries=0)
    messages = [{"role": "user", "content": GO_ON}]
    with client.messages.stream(model=MODEL, max_tokens=4000, messages=messages) as stream:
        next(iter(stream.text_stream))
    scripted.wait_until_idle()
