"""Requests of agents become trees: they continue, go back, fork, are compacted, or come from a subagent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions
from hybridmem.models import LanguageModel
from tests.chat.servers import MODEL, Gated, Running, running, wait_until
from tests.extent import few_cases

SYSTEM, CAT, ASK = "Be brief.", "My cat is called Zoe.", "What is my cat called?"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(embedded: LanguageModel, tokenizer: Tokenizer) -> Iterator[Running]:
    with running(embedded, tokenizer, ServerOptions(trees=True, default_tokens=32)) as server:
        yield server
        server.settle()


class Agent:
    """Is a client that sends its whole history, as chats or as messages, with the name of a session in a header."""

    def __init__(self, server: Running, header: dict[str, str] | None = None, *, path: str = "/v1/chat/completions"):
        self.server, self.header, self.path = server, header or {}, path
        self.history: list[dict[str, Any]] = [] if path == "/v1/messages" else [{"role": "system", "content": SYSTEM}]
        self.n_asked = 0

    def say(self, text: str, **options: Any) -> str:
        self.history.append({"role": "user", "content": text})
        body = {"model": MODEL, "messages": self.history, "temperature": 0} | options
        body |= {"system": SYSTEM} if self.path == "/v1/messages" else {}
        answer = self.server.call("POST", self.path, body, self.header)
        assert answer.status == 200, answer.body
        if self.path == "/v1/messages":
            self.history.append({"role": "assistant", "content": answer.json["content"]})
            return "".join(block.get("text", "") for block in answer.json["content"])
        message = answer.json["choices"][0]["message"]
        self.history.append({name: message[name] for name in ("role", "content", "tool_calls") if name in message})
        return str(message["content"])


def sessions_of(server: Running) -> list[dict[str, Any]]:
    return list(server.call("GET", "/v1/sessions").json["data"])


def tree_of(server: Running, session_id: str, n_nodes: int) -> list[dict[str, Any]]:
    """Return the nodes of a session, once there are so many."""

    def nodes() -> list[dict[str, Any]]:
        return list(server.call("GET", f"/v1/sessions/{session_id}/tree").json.get("nodes", []))

    wait_until(lambda: len(nodes()) >= n_nodes)
    assert len(nodes()) == n_nodes
    return nodes()


def session_with(server: Running, text: str, n_nodes: int) -> list[dict[str, Any]]:
    """Return the tree of the only session in which something was said."""
    wait_until(lambda: bool(server.call("GET", f"/v1/sessions?search={text}").json["data"]))
    (session,) = server.call("GET", f"/v1/sessions?search={text}").json["data"]
    return tree_of(server, session["id"], n_nodes)


HEADERS = ("x-session-id", "X-Claude-Code-Session-Id", "thread-id", "session-id", "")


@few_cases
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("header", HEADERS)
def test_a_session_goes_on_goes_back_and_forks(server: Running, path: str, header: str) -> None:
    word = "q" + "".join(sign for sign in f"{header or 'none'}{path}" if sign.isalnum())
    agent = Agent(server, {header: word} if header else {}, path=path)
    agent.say(f"My name is {word}.")
    assert agent.say(CAT) == "Okay, noted."
    two_turns = list(agent.history)
    assert "Zoe" in agent.say(ASK)
    nodes = session_with(server, word, 7)
    assert [node["role"] for node in nodes] == ["system", *["user", "assistant"] * 3]
    assert [node["parent"] for node in nodes] == [None, *(node["id"] for node in nodes[:-1])]
    assert nodes[-1]["text"] == agent.history[-1]["content"] or path == "/v1/messages"
    assert all(node["cost"]["compute_tokens"] <= 1 for node in nodes[-2:])
    agent.history = two_turns
    agent.say("My dog is called Rex.")  # The agent goes back, and says something else.
    nodes = session_with(server, word, 9)
    assert nodes[7]["parent"] == nodes[4]["id"] and nodes[5]["parent"] == nodes[4]["id"]
    # A client can still return to the branch that was left. It continues from that branch's own token ids.
    body = {"model": MODEL, "input": "And now?", "previous_response_id": nodes[6]["id"], "temperature": 0}
    resumed = server.call("POST", "/v1/responses", body).json
    assert resumed["hybrid_memory"]["history"].startswith(f"continues from the token ids of {nodes[6]['id']}")
    assert server.call("GET", f"/v1/responses/{nodes[6]['id']}").json["usage"]["input_tokens"] > 0


def test_a_subagent_and_a_compaction_are_branches_of_one_session(server: Running) -> None:
    agent = Agent(server, {"x-session-id": "compacted"})
    agent.say("This is the compacted one.")
    agent.say(CAT)
    sub = Agent(server, {"x-session-id": "compacted"})
    sub.history[0] = {"role": "system", "content": "Search for files."}
    sub.say("Where is it?")
    agent.history = [agent.history[0], {"role": "user", "content": "Summary: my cat is called Zoe."}]
    agent.history.append({"role": "assistant", "content": "Okay, noted."})
    agent.say(ASK)
    nodes = session_with(server, "compacted", 12)
    roots = [node for node in nodes if node["parent"] is None]
    assert [root["text"] for root in roots] == [SYSTEM, "Search for files."]
    below = [node["text"] for node in nodes if node["parent"] == roots[0]["id"]]
    assert below == ["This is the compacted one.", "Summary: my cat is called Zoe."]


def test_calls_and_results_continue_whatever_their_ids_are(server: Running) -> None:
    agent = Agent(server, {"x-session-id": "calling"})
    agent.say("Look at the calling one.", tools=[TOOL], tool_choice="required")
    (call, *_) = agent.history[-1]["tool_calls"]
    function = call["function"]
    call["function"] = {"name": function["name"], "arguments": json.dumps(json.loads(function["arguments"]), indent=3)}
    for i, each in enumerate(agent.history[-1]["tool_calls"]):
        each["id"] = f"another_{i}"
        agent.history.append({"role": "tool", "tool_call_id": each["id"], "content": "a dog"})
    agent.say(CAT, tools=[TOOL])
    nodes = session_with(server, "calling", 6)
    assert [node["role"] for node in nodes] == ["system", "user", "assistant", "tool", "user", "assistant"]
    assert [node["parent"] for node in nodes] == [None, *(node["id"] for node in nodes[:-1])]


def test_a_named_session_goes_on_after_its_histories_were_forgotten(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(server, {"x-session-id": "forgotten"})
    agent.say("This is the forgotten one.")
    session_with(server, "forgotten", 3)
    monkeypatch.setattr("hybridmem.chat.server.agents.recording._MOST_KNOWN", 1)
    Agent(server).say("Another one.")
    agent.say(CAT)
    nodes = session_with(server, "forgotten", 5)
    assert nodes[3]["parent"] == nodes[2]["id"]
    server.call("DELETE", f"/v1/sessions/{next(s['id'] for s in sessions_of(server) if 'forgotten' in s['title'])}")
    agent.say(ASK)  # Deleted sessions begin anew.
    assert len(session_with(server, "forgotten", 7)) == 7


def test_a_beginning_and_its_rest_are_one_reply(server: Running) -> None:
    agent = Agent(server, {"x-session-id": "beginning"})
    agent.history += [{"role": "user", "content": "The beginning one."}, {"role": "assistant", "content": "Okay,"}]
    body = {"model": MODEL, "messages": agent.history, "temperature": 0, "continue_final_message": True}
    answer = server.call("POST", "/v1/chat/completions", body, agent.header)
    agent.history[-1]["content"] += answer.json["choices"][0]["message"]["content"]
    agent.say(CAT)
    nodes = session_with(server, "beginning", 5)
    assert nodes[2]["text"] == agent.history[2]["content"] and nodes[3]["parent"] == nodes[2]["id"]


def test_unstored_responses_that_name_a_session_are_recorded(server: Running) -> None:
    """Codex sends such responses."""
    items: list[Any] = [{"role": "developer", "content": SYSTEM}]
    for text in ("The unstored one.", CAT):
        items.append({"role": "user", "content": text})
        body = {"model": MODEL, "input": items, "store": False, "temperature": 0, "prompt_cache_key": text}
        assert server.call("POST", "/v1/responses", body).status == 200
        items += server.call("POST", "/v1/responses", body, {"thread-id": "unstored"}).json["output"]
    nodes = session_with(server, "unstored", 5)
    assert [node["parent"] for node in nodes] == [None, *(node["id"] for node in nodes[:-1])]


def test_what_was_said_when_the_client_went_away_is_kept(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    model = Gated(embedded)
    with running(model, tokenizer, ServerOptions(trees=True)) as server:
        model.is_open = False
        connection = server.connect()
        body = {"model": MODEL, "messages": [{"role": "user", "content": CAT}], "stream": True, "temperature": 0}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        model.may_step.release()
        model.may_step.release()
        assert connection.getresponse().readline()
        connection.close()
        model.open()
        nodes = session_with(server, "cat", 2)
        assert nodes[1]["status"] == "incomplete" and "Okay, noted.".startswith(nodes[1]["text"])


def test_nothing_is_stored_unless_the_server_is_told_to(plain_server: Running) -> None:
    n_before = len(sessions_of(plain_server))
    Agent(plain_server, {"x-session-id": "mine"}).say(CAT)
    assert len(sessions_of(plain_server)) == n_before
