"""Runs agents of Haystack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("haystack")
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from openai import BadRequestError
from scripts import GO_ON, LOOKS, TOO_LONG, ScriptedServer, cancel_task  # type: ignore[import-not-found]

PACKAGE = "haystack-ai"


def agent(server: ScriptedServer, look: Callable[[str], str], **settings: Any) -> Agent:
    key = Secret.from_token("none is needed")
    model = OpenAIChatGenerator(api_key=key, model="embedded", api_base_url=f"{server.url}/v1")
    return Agent(chat_generator=model, tools=[create_tool_from_function(look)], **settings)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_loop(scripted: ScriptedServer, is_stream: bool, look: Callable[[str], str], looked: list[str]) -> None:
    """an agent that loops with two tools, whole and as a stream, with a restart of the server in the middle."""
    pieces: list[str] = []

    def take(chunk: StreamingChunk) -> None:
        pieces.append(chunk.content)

    asked = agent(scripted, look, streaming_callback=take if is_stream else None)
    assert asked.run(messages=[ChatMessage.from_user(LOOKS)])["last_message"].text == "All is done."
    assert ("All is done." in "".join(pieces)) == is_stream
    assert looked == ["here", "there"]


def test_cancel(scripted: ScriptedServer, look: Callable[[str], str]) -> None:
    """a cancelled run."""
    cancel_task(agent(scripted, look).run_async(messages=[ChatMessage.from_user(GO_ON)]), scripted)


def test_overflow(scripted: ScriptedServer, look: Callable[[str], str]) -> None:
    """a prompt that is too long."""
    with pytest.raises(BadRequestError, match="maximum context length"):
        agent(scripted, look).run(messages=[ChatMessage.from_user(TOO_LONG)])
