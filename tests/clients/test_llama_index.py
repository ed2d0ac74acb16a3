"""Talks to the server with LlamaIndex, by its client for servers like OpenAI's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import BadRequestError
from pydantic import BaseModel
from scripts import GO_ON, LOOKS, TOO_LONG, ScriptedServer, cancel_task  # type: ignore[import-not-found]

PACKAGE = "llama-index-llms-openai-like"


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def model_at(url: str) -> OpenAILike:
    return OpenAILike(
        model="embedded", api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True,
        max_retries=0,
    )  # fmt: skip


@pytest.fixture
def model(url: str) -> OpenAILike:
    return model_at(url)


def test_chat(model: OpenAILike) -> None:
    """chat with a system message, and streams."""
    messages = [ChatMessage("Be brief.", role="system"), ChatMessage("My cat is called Zoe.")]
    assert model.chat(messages).message.content
    assert list(model.stream_chat(messages))[-1].message.content


def test_complete(model: OpenAILike) -> None:
    """complete."""
    assert model.complete("My cat is called Zoe.").text


def test_structured(model: OpenAILike) -> None:
    """as_structured_llm."""
    found = model.as_structured_llm(Person).complete("Who is it?").raw
    assert isinstance(found, Person)


def test_tools(model: OpenAILike) -> None:
    """tools that are required."""

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    tool = FunctionTool.from_defaults(add)
    reply = model.chat_with_tools([tool], user_msg="What is 1 + 2?", tool_required=True)
    (call, *_) = model.get_tool_calls_from_response(reply)
    assert call.tool_name == "add" and set(call.tool_kwargs) == {"a", "b"}


def test_a_loop(scripted: ScriptedServer, look: Callable[[str], str], looked: list[str]) -> None:
    """FunctionAgent: a loop with two tools, with a restart of the server in the middle."""

    async def ask() -> str:
        return str(await FunctionAgent(tools=[look], llm=model_at(f"{scripted.url}/v1")).run(LOOKS))

    assert asyncio.run(ask()) == "All is done." and looked == ["here", "there"]


def test_cancel(scripted: ScriptedServer) -> None:
    """a cancelled chat."""
    cancel_task(model_at(f"{scripted.url}/v1").achat([ChatMessage(GO_ON)]), scripted)


def test_overflow(model: OpenAILike) -> None:
    """a prompt that is too long."""
    with pytest.raises(BadRequestError, match="maximum context length"):
        model.chat([ChatMessage(TOO_LONG)])
