"""Runs agents of smolagents."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

pytest.importorskip("smolagents")
from scripts import GO_ON, LOOKS, TOO_LONG, ScriptedServer  # type: ignore[import-not-found]
from smolagents import AgentGenerationError, ChatMessage, CodeAgent, MessageRole, OpenAIModel, ToolCallingAgent, tool

PACKAGE = "smolagents"
ANSWER = '[[CALL {"name": "final_answer", "arguments": {"answer": "All is done."}}]] [[SAY All is done.]]'


@pytest.fixture
def model(scripted: ScriptedServer) -> OpenAIModel:
    return OpenAIModel("embedded", api_base=f"{scripted.url}/v1", api_key="none is needed")


def test_a_loop(model: OpenAIModel, look: Callable[[str], str], looked: list[str]) -> None:
    """ToolCallingAgent: a loop with two tools and a final answer, with a restart of the server in the middle."""
    agent = ToolCallingAgent([tool(look)], model, max_steps=5, verbosity_level=0)
    said = LOOKS.replace("[[SAY All is done.]]", ANSWER)
    assert agent.run(said) == "All is done." and looked == ["here", "there"]


def test_code(model: OpenAIModel) -> None:
    """CodeAgent: code that is run."""
    agent = CodeAgent([], model, max_steps=3, verbosity_level=0)
    assert agent.run("Do it. [[SAY Thought: I add. <code>final_answer(40 + 2)</code>]]") == 42


def test_cancel(model: OpenAIModel, scripted: ScriptedServer) -> None:
    """a cancelled stream."""
    stream = model.generate_stream([ChatMessage(MessageRole.USER, GO_ON)])
    next(stream)
    stream.close()
    gc.collect()  # smolagents does not close OpenAI's stream, which ends when Python collects it.
    scripted.wait_until_idle()


def test_overflow(model: OpenAIModel) -> None:
    """a prompt that is too long."""
    with pytest.raises(AgentGenerationError, match="maximum context length"):
        CodeAgent([], model, max_steps=3, verbosity_level=0).run(TOO_LONG)
