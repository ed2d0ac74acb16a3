"""Feeds damaged versions of what clients send: bodies of requests, and the schemas or grammars for replies."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fuzzing.mutation import damage_bytes, damage_json
from hybridmem.chat.prompts import load_tokenizer
from hybridmem.chat.sampling.grammar import Grammar, Grammars, fill_masks
from hybridmem.chat.server.bodies import count_longest_list
from hybridmem.chat.server.embedding import EmbeddingsRequest
from hybridmem.chat.server.schema import ChatRequest, Checked, CommonRequest, CompletionRequest, read_request
from hybridmem.chat.server.sessions import schema as sessions
from hybridmem.chat.server.sessions.archives import Archive
from hybridmem.chat.server.tokenizing import DetokenizeRequest, TokenizeRequest
from hybridmem.chat.tools.grammars import MOST_GRAMMAR

_MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
_CALL = {"name": "find", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
_ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
]
_NODES = [
    {"id": "msg_1", "role": "user", "items": _ITEMS[:1], "n_tokens": 2},
    {
        "id": "resp_1", "parent": "msg_1", "role": "assistant", "items": [{"role": "assistant", "content": "b"}],
        "about": {"temperature": 0.5, "tools": []}, "n_prompt": 2, "n_tokens": 3, "tokens": [1, 2, 3, 4, 5],
    },
]  # fmt: skip
SEEDS: list[tuple[type[Checked], Any]] = [
    (ChatRequest, {
        "model": "m", "messages": _MESSAGES, "temperature": 0.5, "stop": ["x"], "stream": True, "n": 2,
        "stream_options": {"include_usage": True}, "seed": 3, "max_tokens": 9, "top_p": 0.9, "top_k": 5,
    }),
    (ChatRequest, {
        "model": "m", "messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, *_MESSAGES],
        "tools": [{"type": "function", "function": _CALL}], "tool_choice": {"type": "function", "function": _CALL},
        "user": "u", "logit_bias": {"3": -1.5}, "logprobs": True, "top_logprobs": 2, "min_p": 0.1,
        "chat_template_kwargs": {"enable_thinking": False}, "prediction": {"type": "content", "content": "b"},
    }),
    (ChatRequest, {
        "model": "m", "messages": _MESSAGES,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _CALL["parameters"]}},
    }),
    (CompletionRequest, {"model": "m", "prompt": ["a", [1, 2, 3]], "max_tokens": 3, "echo": True, "n": 1}),
    (CompletionRequest, {"model": "m", "prompt": [1, 2, 3], "stop": "x", "logprobs": None, "guided_regex": "a+"}),
    (sessions.ResponseRequest, {
        "model": "m", "input": _ITEMS, "instructions": "i", "tools": [{"type": "function", **_CALL}], "store": True,
        "text": {"format": {"type": "json_object"}}, "metadata": {"a": "b"}, "reasoning": {"effort": "low"},
        "max_output_tokens": 5, "previous_response_id": "resp_1",
    }),
    (sessions.ConversationRequest, {"items": _ITEMS, "metadata": {"a": "b"}}),
    (sessions.ForkRequest, {"node": "resp_1", "token": 3, "title": "t", "answer": True, "temperature": 1.0}),
    (sessions.EditRequest, {"node": "msg_1", "content": [{"type": "input_text", "text": "a"}], "answer": True}),
    (sessions.PinRequest, {"seconds_to_live": 5.0}),
    (Archive, {
        "format": "hybrid-memory.session", "version": 1, "model": "m", "title": "t", "head": "resp_1", "nodes": _NODES,
    }),
    (TokenizeRequest, {"model": "m", "messages": _MESSAGES, "return_token_strs": True}),
    (TokenizeRequest, {"content": "a", "with_pieces": True, "add_special": False}),
    (DetokenizeRequest, {"model": "m", "tokens": [1, 2, 3]}),
    (EmbeddingsRequest, {"model": "m", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}),
]  # fmt: skip


class RequestBody:
    """Reads damaged request bodies of every endpoint."""

    def __init__(self, folder: Path) -> None:
        pass

    def draw(self, random: Random) -> bytes:
        number = random.randrange(len(SEEDS))
        seed = SEEDS[number][1]
        if random.random() < 0.2:
            return b"%d\n" % number + damage_bytes(json.dumps(seed).encode(), random)
        return b"%d\n" % number + json.dumps(damage_json(seed, random)).encode()

    def read(self, data: bytes) -> None:
        number, _, body = data.partition(b"\n")
        count_longest_list(body, 100)
        asked = read_request(SEEDS[int(number)][0], body)
        if isinstance(asked, CommonRequest):
            for choice in range(asked.n):
                asked.sampling(choice)


_SCHEMA = {
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    },
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20, "pattern": "^[a-z]+(-[a-z]+)*$"},
        "when": {"type": "string", "format": "date-time"},
        "size": {"type": "integer", "minimum": -3, "exclusiveMaximum": 40, "multipleOf": 2},
        "text": {"allOf": [{"type": "string", "pattern": "a.*b"}, {"pattern": "b.*c"}]},
        "part": {"type": "number", "minimum": 0.5},
        "kind": {"enum": ["a", "b", 1, None]},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
        "pair": {"prefixItems": [{"const": 1}, {"type": "string"}], "items": False},
        "node": {"$ref": "#/$defs/node"},
    },
    "required": ["name", "node"],
    "additionalProperties": False,
    "patternProperties": {"^x_": {"oneOf": [{"type": "string"}, {"type": "integer"}]}},
}
_PATTERNS = (r"(a|b)+c{1,5}", r"\d{4}-\d{2}(T\d{2}:\d{2})?", r"[^\x00-\x1f\"]*", r"(?i)yes|no", r"((a{1,9}){1,9}){1,9}")
_LARKS = (
    'start: "a" b+ ("," b)*\nb: /[0-9]{1,3}/ | "(" start ")"\n%ignore / /',
    'root ::= "a" item+\nitem ::= [0-9a-f] | "(" root ")"',
)


class ReplyForm:
    """Compiles damaged schemas, patterns and grammars of replies, and chooses some tokens that they allow."""

    def __init__(self, folder: Path) -> None:
        tokenizer = load_tokenizer("embedded")
        self._n_vocab = len(tokenizer.get_vocab())
        self._grammars = Grammars(tokenizer, self._n_vocab, [0], is_guarded=True)

    def draw(self, random: Random) -> bytes:
        kind = random.random()
        if kind < 0.6:
            return b"json\n" + json.dumps(damage_json(_SCHEMA, random)).encode()
        name, seeds = ("regex", _PATTERNS) if kind < 0.8 else ("lark", _LARKS)
        return name.encode() + b"\n" + damage_bytes(random.choice(seeds).encode(), random)

    def read(self, data: bytes) -> None:
        kind, _, content = data.partition(b"\n")
        text = content.decode(errors="replace")
        if len(text) > MOST_GRAMMAR:
            return
        matcher = self._read(kind, text).matcher()
        for number in range(12):
            fill_masks([matcher])
            if matcher.error is not None or matcher.is_stopped or matcher.mask is None:
                return
            allowed = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")[: self._n_vocab])
            if not len(allowed):
                return
            matcher.add(int(allowed[(7 * number) % len(allowed)]))
            matcher.closing_ids()

    def _read(self, kind: bytes, text: str) -> Grammar:
        if kind == b"json":
            return self._grammars.json_schema(json.loads(text))
        return self._grammars.regex(text) if kind == b"regex" else self._grammars.lark(text)
