"""If a client goes away in the middle of a reply, the server stores what it got."""

from __future__ import annotations

import json
from typing import Any

from hybridmem.chat.prompts import Tokenizer
from hybridmem.models import LanguageModel
from tests.chat.engines import scheduler_of
from tests.chat.servers import MODEL, Gated, Running, running, wait_until

BASE: dict[str, Any] = {"model": MODEL, "temperature": 0, "stream": True}


def leave_in_the_middle(server: Running, gate: Gated, body: dict[str, Any]) -> None:
    """Close the connection when the first text has come, and wait until the server has noticed."""
    connection = server.connect()
    connection.request("POST", "/v1/responses", json_body(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    gate.may_step.release(3)
    while b"output_text.delta" not in response.readline():
        pass
    response.close()
    connection.close()
    wait_until(lambda: all(job.is_cancelled for job in list(scheduler_of(server.engine).jobs.values())))


def json_body(body: dict[str, Any]) -> bytes:
    return json.dumps(BASE | body).encode()


def nodes(server: Running) -> list[dict[str, Any]]:
    (session, *_) = server.call("GET", "/v1/sessions").json["data"] or [None]
    return [] if session is None else server.call("GET", f"/v1/sessions/{session['id']}/tree").json["nodes"]


def test_what_there_is_of_it_stays_but_for_messages_in_a_conversation(
    embedded: LanguageModel, tokenizer: Tokenizer
) -> None:
    gate = Gated(embedded)
    gate.is_open = False
    with running(gate, tokenizer) as server:
        leave_in_the_middle(server, gate, {"input": "My cat is called Zoe."})
        gate.open()
        wait_until(lambda: len(nodes(server)) == 2)
        question, reply = nodes(server)
        assert question["text"] == "My cat is called Zoe." and reply["status"] == "incomplete"
        assert reply["text"] and "Okay, noted.".startswith(reply["text"])
        gate.is_open = False
        (session,) = server.call("GET", "/v1/sessions").json["data"]
        leave_in_the_middle(server, gate, {"input": "What is my cat called?", "conversation": session["id"]})
        gate.open()
        server.settle()
        assert len(nodes(server)) == 2
