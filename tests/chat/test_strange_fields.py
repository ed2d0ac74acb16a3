"""Every field of every request, in the place of which stands a value of any other kind: read, or refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from hybridmem.chat.server.checked import Checked, read_request
from hybridmem.chat.server.embedding import EmbeddingsRequest
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.schema import ChatRequest, CompletionRequest
from hybridmem.chat.server.sessions.archives import Archive
from hybridmem.chat.server.sessions.schema import (
    ConversationRequest,
    EditRequest,
    ForkRequest,
    ItemsRequest,
    PinRequest,
    ResponseRequest,
    SessionRequest,
)
from hybridmem.chat.server.tokenizing import DetokenizeRequest, TokenizeRequest

STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 10**30, 0.5, -1e300, "", "x", "\0", [], [[]], [None], ["x"], {}, {"": None}, {"type": []},
    [{"type": {}}], {"type": "function"}, {"name": 5},
)  # fmt: skip
FUNCTION = {"name": "f", "description": "d", "strict": True, "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAMPLED = {
    "model": "m", "stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"5": 1}, "stop": ["a"],
    "stop_token_ids": [1], "seed": 1, "min_p": 0.1, "priority": 1, "deadline_seconds": 1.5, "top_k": 3,
}  # fmt: skip
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": {"type": "function", "name": "f"}}
FLAT_TOOL = {"model": "m", "tools": [{"type": "function", **FUNCTION}]}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}], "id": "msg_a"},
    {"type": "reasoning", "id": "rs_a", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_a"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "b"}]},
]
FORM = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}}}
MESSAGES = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "t"},
    {"role": "tool", "content": "b", "tool_call_id": "c"},
]
REPLY = {
    "id": "resp_a", "parent": "turn_a", "role": "assistant", "items": [{"role": "assistant", "content": "b"}],
    "about": {"temperature": 0.0, "tools": [{"type": "function", **FUNCTION}], "told_tools": [{}]}, "tokens": [1, 2],
}  # fmt: skip
REQUESTS: list[tuple[type[Checked], dict[str, Any]]] = [
    (ChatRequest, SAMPLED | TOOLS | {"messages": MESSAGES, "response_format": FORM, "logprobs": True}),
    (ChatRequest, {"model": "m", "messages": MESSAGES, "structured_outputs": {"choice": ["a"]}, "metadata": {}}),
    (ChatRequest, {"model": "m", "messages": MESSAGES, "prediction": {"type": "content", "content": "a"}}),
    (CompletionRequest, {"model": "m", "prompt": [[1, 2], "a"], "guided_json": '{"type": "object"}', "logprobs": 1}),
    (EmbeddingsRequest, {"model": "m", "input": ["a", [1]], "user": "u", "pooling": "last"}),
    (TokenizeRequest, {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]}),
    (DetokenizeRequest, {"tokens": [1, 2]}),
    (ResponseRequest, FLAT_TOOL | {"input": ITEMS, "text": {"format": FORM}, "reasoning": {"effort": "low"}}),
    (ResponseRequest, {"model": "m", "conversation": {"id": "conv_a"}, "metadata": {"a": "b"}}),
    (ConversationRequest, {"items": ITEMS, "metadata": {"a": "b"}}),
    (ItemsRequest, {"items": ITEMS, "include": []}),
    (EditRequest, {"node": "turn_a", "content": "a", "item": "msg_a", "answer": True}),
    (ForkRequest, {"node": "resp_a", "token": 1, "title": "t"}),
    (PinRequest, {"seconds_to_live": 1.5}),
    (SessionRequest, {"title": "t", "instructions": "i", "metadata": {}}),
    (
        Archive,
        {
            "format": "hybrid-memory.session", "version": 1, "model": "m", "head": "resp_a", "metadata": {},
            "nodes": [{"id": "turn_a", "role": "user", "items": ITEMS[:1]}, REPLY],
        },
    ),
]  # fmt: skip


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values inside of one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*way, key)
        yield from places(each, (*way, key))


@pytest.mark.parametrize(("model", "body"), REQUESTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_strange_value_is_read_or_refused(model: type[Checked], body: dict[str, Any]) -> None:
    read_request(model, json.dumps(body).encode())
    n_refused = 0
    for *way, last in places(body):
        for strange in STRANGE:
            changed = copy.deepcopy(body)
            place = changed
            for key in way:
                place = place[key]
            place[last] = strange
            try:
                read_request(model, json.dumps(changed).encode())
            except ApiError as error:
                assert error.status == 400, (way, last, strange)
                n_refused += 1
    assert n_refused > 10
