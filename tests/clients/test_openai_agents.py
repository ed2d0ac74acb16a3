"""Runs agents of OpenAI's library for agents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from openai import AsyncOpenAI, BadRequestError
from scripts import GO_ON, LOOKS, TOO_LONG, ScriptedServer, cancel_task  # type: ignore[import-not-found]

PACKAGE = "openai-agents"
each_model = pytest.mark.parametrize("model", [OpenAIChatCompletionsModel, OpenAIResponsesModel])


def agent(server: ScriptedServer, model: Callable[..., Any], *tools: Any) -> Agent:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none is needed")
    return Agent("a", instructions="Be brief.", tools=list(tools), model=model("embedded", client))


@each_model
def test_a_loop(scripted: ScriptedServer, model: type, look: Callable[[str], str], looked: list[str]) -> None:
    """a loop with two tools, over chats and responses, with a restart of the server in the middle."""
    assert Runner.run_sync(agent(scripted, model, function_tool(look)), LOOKS).final_output == "All is done."
    assert looked == ["here", "there"]


@each_model
def test_cancel(scripted: ScriptedServer, model: type) -> None:
    """a cancelled run."""
    cancel_task(Runner.run(agent(scripted, model), GO_ON), scripted)


@each_model
def test_overflow(scripted: ScriptedServer, model: type) -> None:
    """a prompt that is too long."""
    with pytest.raises(BadRequestError, match="maximum context length"):
        Runner.run_sync(agent(scripted, model), TOO_LONG)
