"""Fills a class with Instructor, in each of its modes for servers with OpenAI's interface."""

from __future__ import annotations

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel

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
