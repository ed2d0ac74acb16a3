"""Runs agents of Pydantic AI."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pydantic_ai")
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from scripts import ScriptedServer  # type: ignore[import-not-found]

PACKAGE = "pydantic-ai-slim"
STEPS = " ".join(f'[[CALL {{"name": "look", "arguments": {{"where": "{where}"}}}}]]' for where in ("here", "there"))


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_a_loop(scripted: ScriptedServer, dialect: str) -> None:
    """a loop with two tools, over chats, responses and Anthropic's messages."""
    openai = OpenAIProvider(base_url=f"{scripted.url}/v1", api_key="none is needed")
    anthropic = AnthropicProvider(base_url=scripted.url, api_key="none is needed")
    models: dict[str, Any] = {
        "chat": lambda: OpenAIChatModel("embedded", provider=openai),
        "responses": lambda: OpenAIResponsesModel("embedded", provider=openai),
        "messages": lambda: AnthropicModel("claude-any", provider=anthropic),
    }
    looked = []

    def look(where: str) -> str:
        """Look somewhere."""
        looked.append(where)
        return "a dog"

    agent = Agent(models[dialect](), tools=[look], system_prompt="Be brief.")
    assert agent.run_sync(f"Do it. {STEPS} [[SAY All is done.]]").output == "All is done."
    assert looked == ["here", "there"]
