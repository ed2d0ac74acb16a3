"""Fills a class with Instructor, in each of its modes for servers with OpenAI's interface."""

from __future__ import annotations

import json

import instructor
import pytest
from instructor.core import InstructorRetryException
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, field_validator
from scripts import GO_ON, TOO_LONG, ScriptedServer, cancel_task  # type: ignore[import-not-found]

PACKAGE = "instructor"
ASKED = [{"role": "user", "content": "Who is it?"}]


class Person(BaseModel):
    name: str
    age: int


def test_default() -> None:
    """the default mode."""
    client = instructor.from_openai(OpenAI(max_retries=0))
    found = client.chat.completions.create(model="embedded", messages=ASKED, response_model=Person, max_retries=0)
    assert isinstance(found, Person)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_modes(mode: str) -> None:
    """TOOLS, TOOLS_STRICT, JSON_SCHEMA."""
    client = instructor.from_openai(OpenAI(max_retries=0), mode=instructor.Mode[mode])
    found = client.chat.completions.create(model="embedded", messages=ASKED, response_model=Person, max_retries=0)
    assert isinstance(found, Person)


@pytest.mark.parametrize("mode", ["JSON", "MD_JSON", "JSON_O1"])
def test_modes_that_ask_in_words(mode: str) -> None:
    """JSON, MD_JSON and JSON_O1, which ask for the fields in words, beside guided_json."""
    client = instructor.from_openai(OpenAI(max_retries=0), mode=instructor.Mode[mode])
    form = {"guided_json": Person.model_json_schema(), "response_format": {"type": "text"}}
    found = client.chat.completions.create(
        model="embedded", messages=ASKED, response_model=Person, max_retries=0, extra_body=form
    )
    assert isinstance(found, Person)


def test_responses() -> None:
    """RESPONSES_TOOLS."""
    client = instructor.from_openai(OpenAI(max_retries=0), mode=instructor.Mode.RESPONSES_TOOLS)
    found = client.responses.create(model="embedded", input="Who is it?", response_model=Person, max_retries=0)
    assert isinstance(found, Person)


def test_streams() -> None:
    """partial objects of a stream, and iterables."""
    client = instructor.from_openai(OpenAI(max_retries=0))
    partial = client.chat.completions.create_partial(
        model="embedded", messages=ASKED, response_model=Person, max_retries=0
    )
    assert isinstance(list(partial)[-1].name, str)


def test_a_loop_and_restart(scripted: ScriptedServer) -> None:
    """a second reply, where the first one is refused, with a restart of the server between them."""
    refused = []

    class Adult(Person):
        @field_validator("age")
        @classmethod
        def is_of_age(cls, age: int) -> int:
            if age < 18:
                refused.append(age)
                scripted.restart()
                raise ValueError("must be an adult")
            return age

    calls = [{"name": "Adult", "arguments": {"name": "Zoe", "age": age}} for age in (7, 30)]
    said = "Who is it? " + " ".join(f"[[CALL {json.dumps(call)}]]" for call in calls) + " [[SAY All is done.]]"
    client = instructor.from_openai(OpenAI(base_url=f"{scripted.url}/v1", max_retries=0))
    found = client.chat.completions.create(
        model="embedded", messages=[{"role": "user", "content": said}], response_model=Adult, max_retries=2
    )
    assert (refused, found.age) == ([7], 30)


def test_cancel(scripted: ScriptedServer) -> None:
    """a cancelled reply."""
    # A mode without a grammar, to which this reply would not conform.
    client = instructor.from_openai(AsyncOpenAI(base_url=f"{scripted.url}/v1"), mode=instructor.Mode.MD_JSON)
    asking = client.chat.completions.create(
        model="embedded", messages=[{"role": "user", "content": GO_ON}], response_model=Person, max_retries=0,
        extra_body={"response_format": {"type": "text"}},
    )  # fmt: skip
    cancel_task(asking, scripted)


def test_overflow() -> None:
    """a prompt that is too long."""
    client = instructor.from_openai(OpenAI(max_retries=0))
    messages = [{"role": "user", "content": TOO_LONG}]
    with pytest.raises(InstructorRetryException, match="maximum context length"):
        client.chat.completions.create(model="embedded", messages=messages, response_model=Person, max_retries=0)
