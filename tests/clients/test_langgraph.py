"""Runs graphs of LangGraph with LangChain's model for OpenAI."""

from __future__ import annotations

import pytest

pytest.importorskip("langgraph")
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from scripts import LOOKS, ScriptedServer  # type: ignore[import-not-found]

PACKAGE = "langgraph"


@pytest.mark.parametrize("uses_responses", [False, True])
def test_a_loop(scripted: ScriptedServer, uses_responses: bool) -> None:
    """a graph that loops with two tools, over chats and responses; a thread that goes back to an earlier checkpoint."""
    looked = []

    @tool
    def look(where: str) -> str:
        """Look somewhere."""
        looked.append(where)
        return "a dog"

    model = ChatOpenAI(
        model="embedded", base_url=f"{scripted.url}/v1", api_key="none is needed", use_responses_api=uses_responses
    ).bind_tools([look])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([look]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    agent, thread = graph.compile(checkpointer=InMemorySaver()), {"configurable": {"thread_id": "1"}}
    last = agent.invoke({"messages": [("user", LOOKS)]}, thread)["messages"][-1]
    assert last.text == "All is done." and looked == ["here", "there"]
    n_before = len(scripted.requests())
    before = next(state for state in agent.get_state_history(thread) if len(state.values["messages"]) == 3)
    assert agent.invoke(None, before.config)["messages"][-1].text == "All is done."
    assert looked == ["here", "there", "there"]
    again = scripted.requests()[n_before:]
    assert all(each["prompt_tokens"] - each["cached_tokens"] < 20 for each in again), "its prompts were computed before"
