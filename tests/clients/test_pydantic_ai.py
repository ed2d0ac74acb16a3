"""Runs agents of Pydantic AI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("pydantic_ai")
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelContextWindowExceededError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from scripts import GO_ON, LOOKS, TOO_LONG, ScriptedServer, cancel_task  # type: ignore[import-not-found]

PACKAGE = "pydantic-ai-slim"
each_dialect = pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])


def agent(server: ScriptedServer, dialect: str, *tools: Any) -> Agent:
    openai = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none is needed")
    anthropic = AnthropicProvider(base_url=server.url, api_key="none is needed")
    models: dict[str, Any] = {
        "chat": lambda: OpenAIChatModel("embedded", provider=openai),
        "responses": lambda: OpenAIResponsesModel("embedded", provider=openai),
        "messages": lambda: AnthropicModel("claude-any", provider=anthropic),
    }
    return Agent(models[dialect](), tools=tools, system_prompt="Be brief.")


@each_dialect
def test_a_loop(scripted: ScriptedServer, dialect: str, look: Callable[[str], str], looked: list[str]) -> None:
    """a loop with two tools and a restart of the server, over chats, responses and Anthropic's messages."""
    assert agent(scripted, dialect, look).run_sync(LOOKS).output == "All is done."
    assert looked == ["here", "there"]


@each_dialect
def test_cancel(scripted: ScriptedServer, dialect: str) -> None:
    """a cancelled run."""
    cancel_task(agent(scripted, dialect).run(GO_ON), scripted)


@each_dialect
def test_overflow(scripted: ScriptedServer, dialect: str) -> None:
    """a prompt that is too long, as ModelContextWindowExceededError."""
    with pytest.raises(ModelContextWindowExceededError):
        agent(scripted, dialect).run_sync(TOO_LONG)
