"""Haystack's agent works through a real two-tool loop."""

from __future__ import annotations

from typing import Annotated

import pytest

pytest.importorskip("haystack")
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from scripts import LOOKS, ScriptedServer  # type: ignore[import-not-found]

PACKAGE = "haystack-ai"


def test_a_loop(scripted: ScriptedServer) -> None:
    """an agent that loops with two tools, whole and as a stream."""
    looked = []

    def look(where: Annotated[str, "a place"]) -> str:
        """Look somewhere."""
        looked.append(where)
        return "a dog"

    for is_stream in (False, True):
        pieces: list[str] = []

        def take(chunk: StreamingChunk, pieces: list[str] = pieces) -> None:
            pieces.append(chunk.content)

        model = OpenAIChatGenerator(
            api_key=Secret.from_token("none is needed"), model="embedded", api_base_url=f"{scripted.url}/v1"
        )
        agent = Agent(
            chat_generator=model,
            tools=[create_tool_from_function(look)],
            streaming_callback=take if is_stream else None,
        )
        assert agent.run(messages=[ChatMessage.from_user(LOOKS)])["last_message"].text == "All is done."
        assert not is_stream or "All is done." in "".join(pieces)
    assert looked == ["here", "there"] * 2
