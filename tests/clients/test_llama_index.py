"""Talks to the server with LlamaIndex, by its client for servers like OpenAI's."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from scripts import LOOKS, ScriptedServer  # type: ignore[import-not-found]

PACKAGE = "llama-index-llms-openai-like"


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@pytest.fixture
def model(url: str) -> OpenAILike:
    return OpenAILike(
        model="embedded", api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True,
        max_retries=0,
    )  # fmt: skip


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


def test_a_loop(scripted: ScriptedServer) -> None:
    """FunctionAgent: a loop with two tools."""
    looked = []

    def look(where: str) -> str:
        """Look somewhere."""
        looked.append(where)
        return "a dog"

    model = OpenAILike(
        model="embedded", api_base=f"{scripted.url}/v1", api_key="none", is_chat_model=True,
        is_function_calling_model=True, max_retries=0,
    )  # fmt: skip

    async def ask() -> str:
        return str(await FunctionAgent(tools=[look], llm=model).run(LOOKS))

    assert asyncio.run(ask()) == "All is done." and looked == ["here", "there"]
