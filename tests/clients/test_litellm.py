"""Talks to the server with LiteLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import litellm
import pytest
from pydantic import BaseModel
from scripts import GO_ON, LOOKS, TOO_LONG, ScriptedServer, cancel_task  # type: ignore[import-not-found]

PACKAGE = "litellm"
MODEL = "openai/embedded"
CAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "My cat is called Zoe."}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}


class Person(BaseModel):
    name: str
    age: int


def test_completion() -> None:
    """completion, whole, as a stream, and asynchronous."""
    assert litellm.completion(MODEL, CAT).choices[0].message.content
    chunks = list(litellm.completion(MODEL, CAT, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert asyncio.run(litellm.acompletion(MODEL, CAT)).choices[0].message.content


def test_tools() -> None:
    """tools."""
    message = litellm.completion(MODEL, CAT, tools=[TOOL], tool_choice="required").choices[0].message
    (call, *_) = message.tool_calls
    assert "a" in json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    assert litellm.completion(MODEL, [*CAT, message, result], tools=[TOOL]).choices[0].message.content


def test_response_format() -> None:
    """response_format with a class."""
    reply = litellm.completion(MODEL, CAT, response_format=Person)
    assert Person.model_validate_json(reply.choices[0].message.content)


def test_text_completion() -> None:
    """text_completion."""
    assert litellm.text_completion(model="text-completion-openai/embedded", prompt="My cat").choices[0].finish_reason


def test_a_loop(scripted: ScriptedServer, look: Callable[[str], str], looked: list[str]) -> None:
    """a loop with two tools, with a restart of the server in the middle."""
    messages = [{"role": "user", "content": LOOKS}]
    parameters = {"type": "object", "properties": {"where": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    while True:
        message = litellm.completion(MODEL, messages, tools=tools, api_base=f"{scripted.url}/v1").choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            seen = look(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
    assert message.content == "All is done." and looked == ["here", "there"]


def test_cancel(scripted: ScriptedServer) -> None:
    """a cancelled completion."""
    messages = [{"role": "user", "content": GO_ON}]
    cancel_task(litellm.acompletion(MODEL, messages, api_base=f"{scripted.url}/v1"), scripted)


def test_overflow() -> None:
    """a prompt that is too long, as ContextWindowExceededError."""
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(MODEL, [{"role": "user", "content": TOO_LONG}])
