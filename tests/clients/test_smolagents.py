"""An agent of smolagents works through calls of tools."""

from __future__ import annotations

import pytest

pytest.importorskip("smolagents")
from scripts import ScriptedServer  # type: ignore[import-not-found]
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

PACKAGE = "smolagents"
LOOK = '[[CALL {{"name": "look", "arguments": {{"where": "{}"}}}}]]'
ANSWER = '[[CALL {"name": "final_answer", "arguments": {"answer": "All is done."}}]]'


def test_a_loop(scripted: ScriptedServer) -> None:
    """ToolCallingAgent: a loop with two tools and a final answer."""
    looked = []

    @tool
    def look(where: str) -> str:
        """Look somewhere.

        Args:
            where: a place.
        """
        looked.append(where)
        return "a dog"

    model = OpenAIModel("embedded", api_base=f"{scripted.url}/v1", api_key="none is needed")
    agent = ToolCallingAgent([look], model, max_steps=5, verbosity_level=0)
    said = f"Do it. {LOOK.format('here')} {LOOK.format('there')} {ANSWER} [[SAY All is done.]]"
    assert agent.run(said) == "All is done." and looked == ["here", "there"]


def test_code(scripted: ScriptedServer) -> None:
    """CodeAgent: code that is run."""
    model = OpenAIModel("embedded", api_base=f"{scripted.url}/v1", api_key="none is needed")
    agent = CodeAgent([], model, max_steps=3, verbosity_level=0)
    assert agent.run("Do it. [[SAY Thought: I add. <code>final_answer(40 + 2)</code>]]") == 42
