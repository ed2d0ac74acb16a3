"""Runs agents of OpenAI's library for agents."""

from __future__ import annotations

import pytest

pytest.importorskip("agents")
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from scripts import ScriptedServer  # type: ignore[import-not-found]

PACKAGE = "openai-agents"
STEPS = " ".join(f'[[CALL {{"name": "look", "arguments": {{"where": "{where}"}}}}]]' for where in ("here", "there"))


@pytest.mark.parametrize("model", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_a_loop(scripted: ScriptedServer, model: type) -> None:
    """a loop with two tools, over chats and responses."""
    set_tracing_disabled(True)
    looked = []

    @function_tool
    def look(where: str) -> str:
        """Look somewhere."""
        looked.append(where)
        return "a dog"

    client = AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none is needed")
    agent = Agent("a", instructions="Be brief.", tools=[look], model=model("embedded", client))
    assert Runner.run_sync(agent, f"Do it. {STEPS} [[SAY All is done.]]").final_output == "All is done."
    assert looked == ["here", "there"]
