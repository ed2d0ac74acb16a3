"""Writes replies for Anthropic's clients: a message with blocks of content, or the events that build it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from hybridmem.chat.engine.engine import Generation
from hybridmem.chat.server.chat_format import read_whole
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.messages.errors import message_error
from hybridmem.chat.server.replies import Piece
from hybridmem.chat.server.streams import Usage
from hybridmem.chat.tools.calls import parse_json
from hybridmem.chat.tools.reading import Part, Reader

Block = dict[str, Any]


def message_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the usage of a reply in Anthropic's terms, where the tokens of the input do not include cached ones."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "hybrid_memory": usage["hybrid_memory"],
    }


def _stop_of(generation: Generation, *, has_calls: bool) -> dict[str, Any]:
    """Return why a reply ended, in Anthropic's words. A deadline cuts a reply as `max_tokens` does."""
    if generation.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": generation.stopped_by}
    if generation.finish_reason in ("length", "deadline"):
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


def _sign(thoughts: str) -> str:
    """Return the signature of thoughts.

    Clients send back only thoughts that have one; this server does not check signatures.
    """
    return hashlib.sha256(thoughts.encode()).hexdigest()


def _input_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. If the call was cut, its arguments are kept as text."""
    try:
        value = parse_json(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _new_call_id() -> str:
    return f"toolu_{uuid4().hex[:24]}"


@dataclass
class MessageFormat:
    """Writes the one message of a request, whole or as a stream.

    Attributes:
        n_prompt: the tokens of the prompt. The stream sends this number before it is known how many of them were
            cached.
        new_reader: makes the reader of the reply.
    """

    model: str
    n_prompt: int
    new_reader: Callable[[], Reader]
    id: str = field(default_factory=lambda: f"msg_{uuid4().hex[:24]}")
    _open: Block | None = None  # This is the last block, while more of it may come.
    _n_blocks: int = 0
    _n_calls: int = 0
    _reader: Reader | None = None
    _generation: Generation | None = None

    def whole(self, generations: list[Generation], usage: dict[str, object]) -> dict[str, Any]:
        (generation,) = generations
        said = read_whole(self.new_reader(), generation.text)
        content = list[Block]()
        if said.reasoning:
            content.append({"type": "thinking", "thinking": said.reasoning, "signature": _sign(said.reasoning)})
        if said.content:
            content.append({"type": "text", "text": said.content})
        for call in said.calls:
            about = call["function"]
            known = {"id": _new_call_id(), "name": about["name"], "input": _input_of(about["arguments"])}
            content.append({"type": "tool_use", **known})
        stop = _stop_of(generation, has_calls=bool(said.calls))
        return self._message(content) | stop | {"usage": message_usage(usage)}

    def _message(self, content: list[Block]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}

    # The methods below write a stream.

    def begin(self) -> str:
        usage = {
            "input_tokens": self.n_prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }  # fmt: skip
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        self._reader = self.new_reader()
        return _event("message_start", message=message)

    def wait(self) -> str:
        return _event("ping")

    def add(self, piece: Piece, usage: Usage) -> str:
        assert self._reader is not None, "the stream has begun"
        parts = self._reader.feed(piece.text)
        if piece.is_last:
            self._generation = piece.generation
            parts += self._reader.close()
        return "".join(map(self._write, parts))

    def end(self, usage: Usage) -> str:
        assert self._reader is not None and self._generation is not None, "its last piece has come"
        stop = _stop_of(self._generation, has_calls=self._reader.has_calls)
        told = message_usage(usage())
        return self._close() + _event("message_delta", delta=stop, usage=told) + _event("message_stop")

    def fail(self, error: ApiError) -> str:
        return _event("error", error=message_error(error)["error"])

    def _write(self, part: Part) -> str:
        if part.call is not None:
            events = ""
            if part.call.index >= self._n_calls:
                self._n_calls = part.call.index + 1
                events = self._begin({"type": "tool_use", "id": _new_call_id(), "name": part.call.name, "input": {}})
            if part.call.arguments:
                events += self._delta({"type": "input_json_delta", "partial_json": part.call.arguments})
            return events
        if part.reasoning:
            events = self._begin({"type": "thinking", "thinking": "", "signature": ""})
            assert self._open is not None, "it was opened"
            self._open["thinking"] += part.reasoning
            return events + self._delta({"type": "thinking_delta", "thinking": part.reasoning})
        if not part.content:
            return ""
        return self._begin({"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": part.content})

    def _begin(self, block: Block) -> str:
        """Open a block, unless one of the same kind is open. Each call has a block of its own."""
        if self._open is not None and self._open["type"] == block["type"] != "tool_use":
            return ""
        events = self._close() + _event("content_block_start", index=self._n_blocks, content_block=block)
        self._open = dict(block)
        self._n_blocks += 1
        return events

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._n_blocks - 1, delta=delta)

    def _close(self) -> str:
        block, self._open = self._open, None
        if block is None:
            return ""
        events = ""
        if block["type"] == "thinking":
            events = self._delta({"type": "signature_delta", "signature": _sign(block["thinking"])})
        return events + _event("content_block_stop", index=self._n_blocks - 1)


def _event(kind: str, **values: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **values}, separators=(',', ':'))}\n\n"
