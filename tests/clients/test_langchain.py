"""Talks to the server with LangChain, by langchain-openai."""

from __future__ import annotations

import pytest
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

PACKAGE = "langchain-openai"


class Person(BaseModel):
    """A person."""

    name: str = Field(description="the name")
    age: int


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.fixture
def model() -> ChatOpenAI:
    return ChatOpenAI(model="embedded", max_retries=0)


def test_invoke(model: ChatOpenAI) -> None:
    """invoke with a system message, and stream."""
    messages = [SystemMessage("You are a helpful assistant."), HumanMessage("My cat is called Zoe.")]
    assert model.invoke(messages).content
    assert "".join(str(chunk.content) for chunk in model.stream(messages))


def test_bind_tools(model: ChatOpenAI) -> None:
    """bind_tools: auto, required and by name, and results of tools."""
    question = HumanMessage("What is 1 + 2?")
    assert model.bind_tools([add]).invoke([question]).content
    for choice in ("any", "add"):
        reply = model.bind_tools([add], tool_choice=choice).invoke([question])
        (call, *_) = reply.tool_calls
        assert call["name"] == "add" and add.invoke(call["args"]) == call["args"]["a"] + call["args"]["b"]
        results = [ToolMessage("3", tool_call_id=call["id"]) for call in reply.tool_calls]
        assert model.bind_tools([add]).invoke([question, reply, *results]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_with_structured_output(model: ChatOpenAI, method: str) -> None:
    """with_structured_output by json_schema, function_calling and json_mode."""
    if method == "json_mode":  # With this method, any object is a valid reply.
        assert isinstance(model.with_structured_output(None, method=method).invoke("JSON, please"), dict)
    else:
        assert isinstance(model.with_structured_output(Person, method=method).invoke("Who is it?"), Person)
