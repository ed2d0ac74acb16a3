"""Our own API of stored sessions covers costs of going back, edits, forks, pins, and documents that move elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.chat.servers import MODEL, PATIENCE_SECONDS, Running, wait_until

BASE: dict[str, Any] = {"model": MODEL, "temperature": 0}
NO_REPLY = ({"tools": "x"}, {"temperature": "hot"}, {"temperature": 9}, {"max_output_tokens": -5}, {"instructions": 5})
CAT, ASK, LUNA = "My cat is called Zoe.", "What is my cat called?", "My cat is called Luna."


class Caller:
    """Is a client with a session that told of a cat, and then asked for its name."""

    def __init__(self, server: Running, key: str) -> None:
        self.server, self._headers = server, {"Authorization": f"Bearer {key}"}
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_SECONDS)
        self.told = self.client.responses.create(input=CAT, **BASE)
        self.asked = self.client.responses.create(input=ASK, previous_response_id=self.told.id, **BASE)
        self.id: str = self.told.hybrid_memory["session"]  # type: ignore[attr-defined]

    def call(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        answer = self.server.call(method, f"/v1/sessions{path}", body, self._headers)
        assert answer.status == status, answer.body
        return answer.json

    def nodes(self, session_id: str | None = None) -> list[dict[str, Any]]:
        return self.call("GET", f"/{session_id or self.id}/tree")["nodes"]  # type: ignore[no-any-return]

    def ask(self, node_id: str) -> Any:
        return self.client.responses.create(input=ASK, previous_response_id=node_id, **BASE)


@pytest.fixture
def caller(server: Running, request: pytest.FixtureRequest) -> Iterator[Caller]:
    caller = Caller(server, request.node.name)
    yield caller
    caller.client.close()


def test_a_tree_says_what_going_back_costs_and_it_does(caller: Caller) -> None:
    nodes = caller.nodes()
    assert [(n["role"], n["text"]) for n in nodes] == [
        ("user", CAT), ("assistant", "Okay, noted."), ("user", ASK), ("assistant", "Your cat is called Zoe."),
    ]  # fmt: skip
    assert [n["parent"] for n in nodes] == [None, *(n["id"] for n in nodes[:-1])]
    usage = caller.asked.usage
    assert usage is not None and (nodes[2]["position"], nodes[3]["position"]) == (
        usage.input_tokens, usage.total_tokens
    )  # fmt: skip
    assert all(n["cost"]["compute_tokens"] <= 1 and n["cost"]["from"] in ("checkpoint", "window") for n in nodes)
    with caller.server.engine.lock:
        caller.server.prefixes.clear()
    nodes = caller.nodes()
    assert all(n["cost"]["from"] == "nothing" and n["cost"]["compute_tokens"] == n["position"] for n in nodes)
    assert nodes[3]["cost"]["seconds"] > nodes[0]["cost"]["seconds"] > 0
    assert nodes[0]["cost"]["words"] == "nothing is kept of it, 10 tokens to compute"
    # What is not kept is computed again, from the same token ids.
    again = caller.ask(caller.told.id)
    assert again.output_text == caller.asked.output_text and again.usage.input_tokens == usage.input_tokens
    assert again.usage.input_tokens_details.cached_tokens == 0


def test_an_edit_stands_beside_what_was_edited(caller: Caller) -> None:
    first = caller.nodes()[0]
    edit = {"node": first["id"], "content": LUNA, "answer": True, "temperature": 0}
    noted = caller.call("POST", f"/{caller.id}/edit", edit)
    assert noted["object"] == "response" and caller.ask(noted["id"]).output_text == "Your cat is called Luna."
    assert caller.ask(caller.told.id).output_text == "Your cat is called Zoe."
    roots = [n for n in caller.nodes() if n["parent"] is None]
    assert [n["text"] for n in roots] == [CAT, LUNA]


def test_a_reply_that_was_edited_is_what_the_model_reads(caller: Caller) -> None:
    edit = {"node": caller.asked.id, "content": "Your cat is called Rex."}
    node = caller.call("POST", f"/{caller.id}/edit", edit)
    assert (node["object"], node["text"], node["parent"]) == (
        "session.node", "Your cat is called Rex.", caller.nodes()[3]["parent"]
    )  # fmt: skip
    # The new node is the current one. What follows it continues from the token ids before it.
    reply = caller.client.responses.create(input=ASK, conversation=caller.id, **BASE)
    said = [item.content[0].text for item in caller.client.responses.input_items.list(reply.id, order="asc")]  # type: ignore[union-attr]
    assert said == [CAT, "Okay, noted.", ASK, "Your cat is called Rex.", ASK]
    assert reply.hybrid_memory["history"] == f"continues from the token ids of {caller.told.id}"  # type: ignore[attr-defined]
    caller.call("POST", f"/{caller.id}/head", {"node": caller.told.id})
    assert caller.call("GET", f"/{caller.id}")["head"] == caller.told.id


def test_a_reply_is_generated_again_beside_it_or_as_it_began(caller: Caller) -> None:
    again = caller.call("POST", f"/{caller.id}/regenerate", {"node": caller.asked.id})
    assert again["output"][0]["content"][0]["text"] == caller.asked.output_text and again["temperature"] == 0
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == again["usage"]["input_tokens"] - 1
    cut = caller.call("POST", f"/{caller.id}/fork", {"node": caller.asked.id, "token": 2})
    assert cut["text"] == "Your cat" and cut["n_tokens"] == 2 and cut["cost"]["compute_tokens"] <= 1
    assert caller.client.responses.retrieve(cut["id"]).output_text == "Your cat"
    body = {"node": caller.asked.id, "token": 2, "answer": True, "stream": True}
    answer = caller.server.call(
        "POST", f"/v1/sessions/{caller.id}/fork", body, {"Authorization": f"Bearer {caller.client.api_key}"}
    )
    assert b'"delta":"Your cat"' in answer.body and b"Your cat is called Zoe." in answer.body
    caller.call("POST", f"/{caller.id}/fork", {"node": caller.asked.id, "token": 99}, status=400)


def test_a_fork_is_a_session_of_its_own_that_shares_what_was_computed(caller: Caller) -> None:
    fork = caller.call("POST", f"/{caller.id}/fork", {"node": caller.told.id, "title": "Another way"})
    nodes = caller.nodes(fork["id"])
    assert [n["text"] for n in nodes] == [CAT, "Okay, noted."] and fork["head"] == nodes[-1]["id"]
    assert nodes[-1]["id"] != caller.told.id and nodes[-1]["cost"]["compute_tokens"] <= 1
    reply = caller.client.responses.create(input=ASK, conversation=fork["id"], **BASE)
    assert reply.output_text == "Your cat is called Zoe." and reply.usage is not None
    assert reply.usage.input_tokens_details.cached_tokens == reply.usage.input_tokens - 1
    caller.call("DELETE", f"/{caller.id}")
    assert len(caller.nodes(fork["id"])) == 4
    listed = caller.call("GET", "?search=another")["data"]
    assert listed == caller.call("GET", "?search=is%20my%20CAT")["data"]
    assert caller.call("GET", "?search=input_text")["data"] == []
    assert [(s["id"], s["title"], s["n_nodes"]) for s in listed] == [(fork["id"], "Another way", 4)]


def test_a_branch_is_deleted_with_all_that_follows(caller: Caller) -> None:
    nodes = caller.nodes()
    with caller.server.engine.lock:
        n_before = caller.server.prefixes.stats().n_checkpoints
    gone = caller.call("DELETE", f"/{caller.id}/nodes/{nodes[2]['id']}")
    with caller.server.engine.lock:  # Only what was computed for this node is gone.
        assert caller.server.prefixes.stats().n_checkpoints == n_before - 2
    assert caller.nodes()[1]["cost"]["compute_tokens"] == 1
    assert gone["nodes"] == [nodes[2]["id"], caller.asked.id]
    with pytest.raises(openai.NotFoundError):
        caller.client.responses.retrieve(caller.asked.id)
    assert caller.call("GET", f"/{caller.id}")["head"] == caller.told.id
    caller.call("DELETE", f"/{caller.id}/nodes/{nodes[0]['id']}")
    caller.call("GET", f"/{caller.id}", status=404)
    with caller.server.engine.lock:
        assert caller.server.prefixes.stats().n_checkpoints == n_before - 4


def test_a_pinned_node_stays_until_its_time_is_over(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prefixes, now = caller.server.engine, caller.server.prefixes, [caller.server.sessions.now()]
    monkeypatch.setattr(caller.server.sessions, "now", lambda: now[0])

    def given_way() -> bool:
        """Let everything give way that may, and return whether the node is still kept."""
        with engine.lock:
            prefixes.reclaim(engine.memory.budget_bytes)
        return next(n for n in caller.nodes() if n["id"] == caller.told.id)["cost"]["from"] == "nothing"

    with engine.lock:
        prefixes.clear()
    pinned = caller.call("POST", f"/{caller.id}/nodes/{caller.told.id}/pin", {"seconds_to_live": 1.5})
    assert pinned["pinned"] and pinned["bytes"] > 0
    assert not given_way()  # The missing part was computed.
    node = next(n for n in caller.nodes() if n["id"] == caller.told.id)
    assert node["pinned"] and node["cost"]["compute_tokens"] <= 1
    now[0] += 1.5
    wait_until(lambda: not any(n["pinned"] for n in caller.nodes()))
    wait_until(given_way)  # The response says that the node is unpinned a moment before it is.
    caller.call("POST", f"/{caller.id}/nodes/{caller.told.id}/pin", {})
    assert caller.call("GET", f"/{caller.id}")["pinned"]
    caller.call("DELETE", f"/{caller.id}/nodes/{caller.told.id}/pin")
    assert not caller.call("GET", f"/{caller.id}")["pinned"]


def test_a_session_moves_as_a_document(caller: Caller) -> None:
    document = caller.call("GET", f"/{caller.id}/export")
    imported = caller.call("POST", "/import", document)
    old, new = caller.nodes(), caller.nodes(imported["id"])
    kept = ("role", "text", "n_tokens", "position", "cost", "created_at")
    assert [[n[k] for k in kept] for n in new] == [[n[k] for k in kept] for n in old]
    assert not {n["id"] for n in new} & {n["id"] for n in old} and imported["head"] == new[-1]["id"]
    # Token ids of another model mean nothing here: only the texts are taken.
    other = caller.call("POST", "/import", document | {"model": "another"})
    reply = caller.client.responses.create(input=ASK, conversation=other["id"], **BASE)
    assert "no token ids are known" in reply.hybrid_memory["history"]  # type: ignore[attr-defined]
    for wrong in (
        {"version": 2}, {"head": "resp_0"}, {"nodes": document["nodes"][1:]}, {"nodes": [document["nodes"][0]] * 2},
        *({"nodes": [document["nodes"][0], document["nodes"][1] | {"tokens": [token]}]} for token in (10**6, 10**30)),
        *({"nodes": [document["nodes"][0], document["nodes"][1] | {"about": about}]} for about in NO_REPLY),
    ):  # fmt: skip
        caller.call("POST", "/import", document | wrong, status=400)
