"""Talks to the server with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel
from scripts import GO_ON, LOOKS, TOO_LONG, ScriptedServer  # type: ignore[import-not-found]

PACKAGE = "openai"
MODEL = "embedded"
CAT = [{"role": "user", "content": "My cat is called Zoe."}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}
WHERE = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": WHERE}}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def client() -> OpenAI:
    return OpenAI(max_retries=0)


def test_chat(client: OpenAI) -> None:
    """chat completions."""
    reply = client.chat.completions.create(model=MODEL, messages=CAT)
    assert reply.choices[0].message.content and reply.usage.total_tokens > 0


def test_stream(client: OpenAI) -> None:
    """streams, with usage and log probabilities."""
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=CAT, stream=True, logprobs=True, top_logprobs=2,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[-1].usage.completion_tokens > 0
    assert any(chunk.choices and chunk.choices[0].logprobs for chunk in chunks)
    with client.chat.completions.stream(model=MODEL, messages=CAT) as stream:
        assert stream.get_final_completion().choices[0].message.content


def test_parse(client: OpenAI) -> None:
    """parse, whole and as a stream."""
    reply = client.chat.completions.parse(model=MODEL, messages=CAT, response_format=Person)
    assert isinstance(reply.choices[0].message.parsed, Person)
    with client.chat.completions.stream(model=MODEL, messages=CAT, response_format=Person) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools(client: OpenAI, choice: object) -> None:
    """tools, required and by name, and their results."""
    reply = client.chat.completions.create(model=MODEL, messages=CAT, tools=[TOOL], tool_choice=choice)
    (call, *_) = reply.choices[0].message.tool_calls
    assert call.function.name == "weather" and set(json.loads(call.function.arguments)) == {"city", "days"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}
    messages = [*CAT, reply.choices[0].message, result]
    assert client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message.content
    stream = client.chat.completions.create(model=MODEL, messages=CAT, tools=[TOOL], tool_choice=choice, stream=True)
    assert any(chunk.choices[0].delta.tool_calls for chunk in stream)


def test_responses(client: OpenAI) -> None:
    """responses, stored and continued, and as a stream."""
    first = client.responses.create(model=MODEL, input="My cat is called Zoe.")
    second = client.responses.create(
        model=MODEL, input="What is my cat called?", previous_response_id=first.id, temperature=0
    )
    assert "Zoe" in second.output_text
    assert client.responses.retrieve(second.id).id == second.id
    events = [event.type for event in client.responses.create(model=MODEL, input="Hello", stream=True)]
    assert events[-1] == "response.completed"


def test_conversations(client: OpenAI) -> None:
    """conversations."""
    conversation = client.conversations.create()
    client.responses.create(model=MODEL, input="My cat is called Zoe.", conversation=conversation.id)
    items = client.conversations.items.list(conversation.id)
    assert len(list(items)) == 2
    client.conversations.delete(conversation.id)


def test_completions(client: OpenAI) -> None:
    """completions."""
    assert client.completions.create(model=MODEL, prompt="My cat").choices[0].finish_reason


def test_models(client: OpenAI) -> None:
    """models."""
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_loop(scripted: ScriptedServer, look: Callable[[str], str], looked: list[str]) -> None:
    """a loop with two tools, with a restart of the server in the middle."""
    client = OpenAI(base_url=f"{scripted.url}/v1", max_retries=0)
    messages = [{"role": "user", "content": LOOKS}]
    while True:
        reply = client.chat.completions.create(model=MODEL, messages=messages, tools=[LOOK]).choices[0].message
        if not reply.tool_calls:
            break
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            seen = look(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
    assert (looked, reply.content) == (["here", "there"], "All is done.")


def test_cancel(scripted: ScriptedServer) -> None:
    """a cancelled stream."""
    client = OpenAI(base_url=f"{scripted.url}/v1", max_retries=0)
    messages = [{"role": "user", "content": GO_ON}]
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    next(stream)
    stream.close()
    scripted.wait_until_idle()


def test_overflow(client: OpenAI) -> None:
    """a prompt that is too long."""
    with pytest.raises(BadRequestError, match=r"maximum context length is \d+ tokens") as raised:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": TOO_LONG}])
    assert raised.value.code == "context_length_exceeded"
