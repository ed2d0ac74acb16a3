"""Runs graphs of LangGraph with LangChain's model for OpenAI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("langgraph")
from langchain_core.exceptions import ContextOverflowError
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from scripts import GO_ON, LOOKS, TOO_LONG, ScriptedServer, cancel_task  # type: ignore[import-not-found]

PACKAGE = "langgraph"
THREAD = {"configurable": {"thread_id": "1"}}
both_dialects = pytest.mark.parametrize("uses_responses", [False, True])


def agent(server: ScriptedServer, uses_responses: bool, look: Callable[[str], str]) -> Any:
    tools = [tool(look)]
    model = ChatOpenAI(
        model="embedded", base_url=f"{server.url}/v1", api_key="none is needed", use_responses_api=uses_responses
    ).bind_tools(tools)

    def reply(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    async def reply_later(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", RunnableLambda(reply, reply_later))
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=InMemorySaver())


@both_dialects
def test_a_loop(scripted: ScriptedServer, uses_responses: bool, look: Callable[[str], str], looked: list[str]) -> None:
    """a loop with two tools and a restart, over chats and responses; a thread that goes back to a checkpoint."""
    graph = agent(scripted, uses_responses, look)
    assert graph.invoke({"messages": [("user", LOOKS)]}, THREAD)["messages"][-1].text == "All is done."
    assert looked == ["here", "there"]
    n_before = len(scripted.requests())
    before = next(state for state in graph.get_state_history(THREAD) if len(state.values["messages"]) == 3)
    assert graph.invoke(None, before.config)["messages"][-1].text == "All is done."
    assert looked == ["here", "there", "there"]
    again = scripted.requests()[n_before:]
    assert all(each["prompt_tokens"] - each["cached_tokens"] < 20 for each in again), "its prompts were computed before"


@both_dialects
def test_cancel(scripted: ScriptedServer, uses_responses: bool, look: Callable[[str], str]) -> None:
    """a cancelled run."""
    cancel_task(agent(scripted, uses_responses, look).ainvoke({"messages": [("user", GO_ON)]}, THREAD), scripted)


@both_dialects
def test_overflow(scripted: ScriptedServer, uses_responses: bool, look: Callable[[str], str]) -> None:
    """a prompt that is too long, as ContextOverflowError."""
    with pytest.raises(ContextOverflowError):
        agent(scripted, uses_responses, look).invoke({"messages": [("user", TOO_LONG)]}, THREAD)
