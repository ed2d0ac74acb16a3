"""Asks Outlines for forms of replies, which OpenAI's client sends."""

from __future__ import annotations

from typing import Any, Literal

import pytest

pytest.importorskip("outlines")
import openai
import outlines
from outlines.exceptions import BadRequestError
from pydantic import BaseModel
from scripts import GO_ON, TOO_LONG, ScriptedServer, cancel_task  # type: ignore[import-not-found]

PACKAGE = "outlines"


class Cat(BaseModel):
    name: str
    age: int


def test_forms(url: str) -> None:
    """text; a class; a stream; choices, patterns and grammars by its model for vLLM's servers."""
    client = openai.OpenAI(base_url=url, api_key="none is needed")
    model: Any = outlines.from_openai(client, "embedded")
    assert model("My cat is called Zoe.", temperature=0) == "Okay, noted."
    assert "".join(model.stream("My cat is called Zoe.", temperature=0)) == "Okay, noted."
    assert isinstance(Cat.model_validate_json(model("A cat.", Cat, max_tokens=200)), Cat)
    ours: Any = outlines.from_vllm(client, "embedded")
    assert ours("Is it?", Literal["yes", "no"]) in ("yes", "no")
    assert ours("When?", outlines.regex("[0-9]{4}")).isdigit()
    assert ours("Which?", outlines.cfg('start: "<" ("a" | "b") ">"')) in ("<a>", "<b>")


def test_restart(scripted: ScriptedServer) -> None:
    """a restart of the server between two replies."""
    model: Any = outlines.from_openai(openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none"), "embedded")
    assert model("Hello. [[SAY One.]]") == "One."
    scripted.restart()
    assert model("And now? [[SAY Two.]]") == "Two."


def test_cancel(scripted: ScriptedServer) -> None:
    """a cancelled reply."""
    client = openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none")
    model: Any = outlines.from_openai(client, "embedded")
    cancel_task(model(GO_ON), scripted)


def test_overflow(url: str) -> None:
    """a prompt that is too long."""
    model: Any = outlines.from_openai(openai.OpenAI(base_url=url, api_key="none is needed"), "embedded")
    with pytest.raises(BadRequestError, match="maximum context length"):
        model(TOO_LONG)
