"""The gateway continues streams whose replica was lost, charges keys, and refuses sessions that replicas do not share.

It does so before a replica sees the request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest
from starlette.types import Message

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import load_tokenizer
from hybridmem.chat.server import ServerOptions, make_app
from hybridmem.chat.server.keys import Key
from hybridmem.cluster.routing.prompts import TokenPrompt
from hybridmem.cluster.serving.asgi import lifespan_of, messages_of
from hybridmem.cluster.serving.continuing import ReplySoFar
from hybridmem.cluster.serving.gateway import Gateway, ReplicaLostError
from hybridmem.cluster.serving.reading import PromptReader
from hybridmem.cluster.serving.request import CHARGE, ForwardedRequest
from hybridmem.memory import HybridMemory
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import EMBEDDED, LanguageModel
from tests.cluster.serving.test_reading import request_of

CHAT = {"messages": [{"role": "user", "content": "My dog is called Rex. What is my dog called?"}], "max_tokens": 20}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy chat": ("/v1/chat/completions", {**CHAT, "temperature": 0, "stream_options": {"include_usage": True}}),
    "seeded, two choices": ("/v1/chat/completions", {**CHAT, "seed": 5, "n": 2, "logprobs": True}),
    "text": ("/v1/completions", {"prompt": "My dog", "max_tokens": 12, "temperature": 0, "echo": True, "logprobs": 1}),
}


class Replicas:
    """Answers by one app, as many replicas would; the connection to the n-th breaks after `cuts[n]` messages."""

    def __init__(self, app: Any, cuts: list[int]) -> None:
        self.app, self.cuts, self.bodies = app, cuts, list[bytes]()

    async def answer(self, prompt: TokenPrompt, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
        n_left = self.cuts.pop(0) if self.cuts else 1 << 30
        self.bodies.append(request.body)
        async for messages in messages_of(self.app, request.scope(), request.body):
            for message in messages:
                if not n_left:
                    raise ReplicaLostError("killed")
                n_left -= 1
                yield [message]
        yield [{"type": CHARGE, "n_tokens": 70}]

    async def metrics(self) -> dict[str, str]:
        return {}


def play(
    model: LanguageModel, cuts: list[int], requests: list[ForwardedRequest], **options: Any
) -> tuple[list[list[Message]], Replicas]:
    """Return the messages of each response, and the replicas that have answered."""
    tokenizer = load_tokenizer(EMBEDDED)
    memory = HybridMemory(model.memory_spec, "8MiB")
    app = make_app(Engine(model, memory, tokenizer, prefixes=PrefixCache(memory)), tokenizer, "embedded")
    replicas = Replicas(app, cuts)
    server = ServerOptions(keys=options.pop("keys", ()))

    async def run() -> list[list[Message]]:
        reader = PromptReader(tokenizer, parse_special=False, max_requests=8)
        gateway = Gateway(replicas, reader, server, **options)
        async with lifespan_of(app):
            found = []
            for request in requests:
                messages = messages_of(gateway, request.scope(), request.body)
                found.append([message async for some in messages for message in some])
        reader.close()
        return found

    return asyncio.run(run()), replicas


def events_of(messages: list[Message]) -> list[dict[str, Any]]:
    # A message may hold several events.
    events = b"".join(message.get("body", b"") for message in messages[1:]).split(b"\n\n")
    return [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]


def told(events: list[dict[str, Any]]) -> dict[Any, Any]:
    """Return all that a stream says, joined by choice and part.

    Ids that are drawn for each call are left out.
    """
    said = dict[Any, Any]()
    for event in events:
        for choice in event["choices"]:
            body, index = choice.get("delta", choice), choice["index"]
            calls = [call["function"] for call in body.get("tool_calls", ())]
            for name, value in [*body.items(), *(pair for call in calls for pair in call.items())]:
                if isinstance(value, str):
                    said[index, name] = said.get((index, name), "") + value
            for name, entries in (choice.get("logprobs") or {}).items():
                tokens = [
                    entry["token"] if name == "content" else name for entry in entries or ()
                ]  # Numbers may differ.
                said[index, "logprobs", name] = said.get((index, "logprobs", name), []) + tokens
            said[index, "end"] = choice["finish_reason"] or said.get((index, "end"))
    return said


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_goes_on_where_its_replicas_were_lost(embedded: LanguageModel, name: str) -> None:
    path, body = REQUESTS[name]
    request = request_of(path, {**body, "stream": True})
    (right, broken), _ = play(embedded, [1 << 30, 7, 11], [request, request])
    assert told(events_of(broken)) == told(events_of(right)) and len(told(events_of(right))) > 2
    assert {event["id"] for event in events_of(broken)} == {events_of(broken)[0]["id"]}
    assert broken[-1] == right[-1] and all(sent[-2]["body"].endswith(b"data: [DONE]\n\n") for sent in (broken, right))
    assert "usage" not in events_of(right)[-1] or events_of(broken)[-1]["usage"]["completion_tokens"] > 3


def test_of_calls_and_thoughts_each_part_goes_on() -> None:
    def event(number: int, **delta: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"id": f"chatcmpl-{number}", "created": number, "choices": [choice]}

    def call(index: int, arguments: str, **more: str) -> dict[str, Any]:
        return {"index": index, "function": {"arguments": arguments, **more}}

    reply = ReplySoFar()
    for before in (event(1, role="assistant", content=""), event(1, reasoning_content="Let me"),
                   event(1, tool_calls=[call(0, '{"a"', name="look")])):  # fmt: skip
        assert reply.rest_of(before) is before
    reply.begin_again()
    again = [
        event(2, role="assistant", content=""), event(2, reasoning_content="Let me see"),
        event(2, tool_calls=[call(0, "", name="look")]), event(2, tool_calls=[call(0, '{"a": 1}')]),
        event(2, tool_calls=[call(1, "{}", name="find")]),
    ]  # fmt: skip
    rest = [event["choices"][0]["delta"] for event in map(reply.rest_of, again) if event is not None]
    assert rest == [
        {"reasoning_content": " see"}, {"tool_calls": [call(0, ": 1}")]}, {"tool_calls": [call(1, "{}", name="find")]}
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [5, 9, -1])
def test_a_response_goes_on_under_its_id_and_is_stored_once(embedded: LanguageModel, cut: int) -> None:
    """Its first replica may be lost when everything is stored and only the last event is missing."""
    body = {"input": CHAT["messages"][0]["content"], "stream": True, "temperature": 1.0, "max_output_tokens": 16}
    whole = request_of("/v1/responses", body, idempotency_key="a")
    ((right,), replicas) = play(embedded, [], [whole])
    cut = cut if cut > 0 else len(right) - 2
    shown = replace(request_of("/v1/responses/" + sent(right)[0]["response"]["id"], {}), method="GET", body=b"")
    ((broken, again, stored), replicas) = play(embedded, [cut], [whole, whole, shown])
    events, rights = sent(broken), sent(right)
    assert len(replicas.bodies) == 3 and sent(again) == events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (
        response_of(events)
        == response_of(rights)
        == json.loads(stored[-1]["body"]) | {"usage": ANY, "created_at": ANY, "completed_at": ANY}
    )
    texts = ["".join(event["delta"] for event in some if "delta" in event) for some in (events, rights)]
    assert texts[0] == texts[1] == response_of(events)["output"][0]["content"][0]["text"]


def sent(messages: list[Message]) -> list[dict[str, Any]]:
    """Return the events of a stream of /v1/responses."""
    bodies = [message.get("body", b"").partition(b"data: ")[2] for message in messages[1:]]
    return [json.loads(body) for body in bodies if body]


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response of a complete stream, without what is counted and measured anew."""
    return events[-1]["response"] | {"usage": ANY, "created_at": ANY, "completed_at": ANY}


def test_a_drawn_reply_gets_a_seed_so_that_it_can_go_on(embedded: LanguageModel) -> None:
    # The reply could have any length without `ignore_eos`.
    drawn = {**CHAT, "seed": None, "temperature": 1.5, "stream": True, "ignore_eos": True}
    (broken,), replicas = play(embedded, [9], [request_of("/v1/chat/completions", drawn)])
    first, second = replicas.bodies
    assert first == second and isinstance(json.loads(first)["seed"], int)
    (right,), _ = play(embedded, [], [request_of("/v1/chat/completions", json.loads(first))])
    assert told(events_of(broken)) == told(events_of(right))


def test_a_stream_lost_at_its_very_end_is_complete(embedded: LanguageModel) -> None:
    request = request_of("/v1/chat/completions", {**CHAT, "max_tokens": 1, "temperature": 0, "stream": True})
    (right,), _ = play(embedded, [], [request])
    (cut,), replicas = play(embedded, [len(right) - 1], [request])
    assert told(events_of(cut)) == told(events_of(right)) and cut[-1] == right[-1] and len(replicas.bodies) == 1


def test_a_replica_that_says_something_else_ends_the_stream(embedded: LanguageModel) -> None:
    class Others(Replicas):
        async def answer(self, prompt: TokenPrompt, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
            word = b"cat" if self.bodies else b"dog"
            changed = request.__class__(**{**vars(request), "body": request.body.replace(b"dog", word)})
            async for messages in super().answer(prompt, changed):
                yield messages

    tokenizer = load_tokenizer(EMBEDDED)
    memory = HybridMemory(embedded.memory_spec, "8MiB")
    app = make_app(Engine(embedded, memory, tokenizer), tokenizer, "embedded")
    request = request_of("/v1/completions", {"prompt": "My dog", "max_tokens": 9, "temperature": 0, "echo": True,
                                             "stream": True})  # fmt: skip

    async def run() -> list[Message]:
        reader = PromptReader(tokenizer, parse_special=False, max_requests=8)
        gateway = Gateway(Others(app, [4]), reader, ServerOptions())
        async with lifespan_of(app):
            messages = messages_of(gateway, request.scope(), request.body)
            return [message async for some in messages for message in some]

    assert b'"code":"replica_lost"' in asyncio.run(run())[-1]["body"]


def test_a_key_is_charged_what_replicas_report(embedded: LanguageModel) -> None:
    keys = (Key("ada", "ada's", tokens_per_minute=100),)
    request = request_of("/v1/completions", {"prompt": "My dog", "max_tokens": 1}, authorization="Bearer ada's")
    found, _ = play(embedded, [], [request] * 3, keys=keys)
    assert [messages[0]["status"] for messages in found] == [200, 200, 429]
    assert b"100 tokens a minute are used up" in found[-1][1]["body"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/responses", {"input": "Hello."}, 501),
        ("/v1/responses", {"input": "Hello.", "store": False, "previous_response_id": "resp_1"}, 501),
        ("/v1/responses", {"input": "Hello.", "store": False, "max_output_tokens": 16}, 200),
        ("/v1/conversations", {}, 501),
        ("/v1/sessions/sess_1/branches", {}, 501),
        ("/v1/responsesque", {}, 404),
    ],
)
def test_stored_sessions_are_refused_where_replicas_share_none(
    embedded: LanguageModel, path: str, body: dict[str, Any], status: int
) -> None:
    (messages,), _ = play(embedded, [], [request_of(path, body)], keeps_sessions=False)
    assert messages[0]["status"] == status
    assert status != 501 or b"sessions_not_shared" in messages[1]["body"]
    named = request_of(path, body, x_session_id="mine")  # The request goes to the replica that has the session.
    (messages,), _ = play(embedded, [], [named], keeps_sessions=False)
    assert messages[0]["status"] != 501
