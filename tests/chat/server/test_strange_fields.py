"""In every field of every request, a value of any other kind is read, or refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from hybridmem.chat.server.checked import Checked, read_request
from hybridmem.chat.server.embedding import EmbeddingsRequest
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.llama_server.schema import LlamaCompletion
from hybridmem.chat.server.messages import schema as messages
from hybridmem.chat.server.ollama import schema as ollama
from hybridmem.chat.server.schema import ChatRequest, CompletionRequest
from hybridmem.chat.server.scores import ScoreRequest
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
from tests.extent import few_cases

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
    """Return the paths to all values inside of a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*way, key)
        yield from places(each, (*way, key))


BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                                 {"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"},
                                      {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [
        {"type": "text", "text": "b"}, {"type": "image", "source": {}}]}]},
]  # fmt: skip
ANTHROPIC = {
    "model": "m", "max_tokens": 5, "messages": BLOCKS, "system": [{"type": "text", "text": "s"}], "stream": True,
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}, {"type": "web_search_1"}],
    "tool_choice": {"type": "tool", "name": "f"}, "thinking": {"type": "enabled", "budget_tokens": 5},
    "metadata": {"user_id": "u"}, "stop_sequences": ["a"], "output_config": {"effort": "low"},
}  # fmt: skip
OLLAMA = {
    "model": "m", "options": {"temperature": 0.5, "num_predict": 5, "stop": ["a"]}, "format": {"type": "object"},
    "think": "low", "logprobs": True,
    "messages": [
        {"role": "user", "content": "a", "images": []},
        {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [CALL]},
        {"role": "tool", "content": "b", "tool_name": "f"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}  # fmt: skip
LLAMA = {"prompt": "a", "n_predict": 5, "n_probs": 1, "stop": ["a"], "logit_bias": [[5, -1]], "json_schema": {}}
GENERATE = {"model": "m", "prompt": "a", "system": "b", "options": {"seed": 1}}
SCORE = {"model": "m", "messages": MESSAGES, "choices": ["a", "b"], "tools": [], "reasoning_effort": "low"}
CODEX = {
    "model": "m", "input": [*ITEMS, {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "i"}],
    "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": {}}]}],
}  # fmt: skip
READERS: list[tuple[Callable[[bytes], object], dict[str, Any]]] = [
    *((partial(read_request, model), body) for model, body in REQUESTS),
    (messages.read_chat, ANTHROPIC),
    (lambda body: ollama.read_chat(body).as_chat(), OLLAMA),
    (lambda body: ollama.read_generate(body).as_chat(), GENERATE),
    (lambda body: ollama.read_generate(body).as_completion(), GENERATE),
    (lambda body: read_request(LlamaCompletion, body).as_completion("m"), LLAMA),
    (partial(read_request, ScoreRequest), SCORE),
    (partial(read_request, ScoreRequest), {"model": "m", "prompt": [1, 2], "choices": [[1], "a"]}),
    (partial(read_request, ResponseRequest), CODEX),
]


@few_cases
@pytest.mark.parametrize(("read", "body"), READERS)
def test_a_strange_value_is_read_or_refused(read: Callable[[bytes], object], body: dict[str, Any]) -> None:
    read(json.dumps(body).encode())
    n_refused = 0
    for *way, last in places(body):
        for strange in STRANGE:
            changed = copy.deepcopy(body)
            place = changed
            for key in way:
                place = place[key]
            place[last] = strange
            try:
                read(json.dumps(changed).encode())
            except ApiError as error:
                assert error.status == 400, (way, last, strange)
                n_refused += 1
    assert n_refused > 5
