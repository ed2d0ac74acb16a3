"""Writes chat completions for OpenAI's clients, whole or in pieces. They contain text, thoughts and calls of tools."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from hybridmem.chat.engine.engine import Generation
from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.chat.sampling.token_bytes import TokenBytes
from hybridmem.chat.server.formats import finish_reason_of
from hybridmem.chat.server.logprobs import chat_logprobs, prompt_logprobs
from hybridmem.chat.server.replies import Piece
from hybridmem.chat.tools.calls import CallPart
from hybridmem.chat.tools.reading import Part, Reader

_OWN_ID = re.compile("[A-Za-z0-9]{9}")


@dataclass
class ReplyContent:
    """Holds the content of a reply, its thoughts, and its calls in OpenAI's form."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, part: Part) -> None:
        self.content += part.content
        self.reasoning += part.reasoning
        if part.call is None:
            return
        while len(self.calls) <= part.call.index:
            function = {"name": "", "arguments": ""}
            self.calls.append({"id": id_of(part.call), "type": "function", "function": function})
        function = self.calls[part.call.index]["function"]
        function["name"] += part.call.name
        function["arguments"] += part.call.arguments


def id_of(call: CallPart) -> str:
    """Return the id of a new call: the id that the model wrote, if it has Mistral's form and no other call has it."""
    return call.id if _OWN_ID.fullmatch(call.id) else f"call_{uuid4().hex[:24]}"


def read_whole(reader: Reader, text: str) -> ReplyContent:
    """Read the text of a whole reply."""
    reply = ReplyContent()
    for part in (*reader.feed(text), *reader.close()):
        reply.add(part)
    return reply


@dataclass
class ChatFormat:
    """Writes the chat completions of one request.

    Attributes:
        tokens: the model's tokens, for log probabilities.
        new_reader: makes the reader of a new reply.
        has_reasoning: whether thoughts are sent in addition to the content.
        scored_prompt: the token ids of the prompt, if their log probabilities are sent.
    """

    model: str
    tokens: TokenBytes
    new_reader: Callable[[], Reader]
    has_reasoning: bool = True
    scored_prompt: list[int] | None = None
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    _readers: dict[int, Reader] = field(default_factory=dict)
    _untold: dict[int, list[Chosen]] = field(default_factory=dict)  # The text of these tokens has not been sent yet.

    def whole(self, generations: list[Generation], usage: dict[str, object]) -> dict[str, Any]:
        choices = [self._choice(i, generation) for i, generation in enumerate(generations)]
        whole = self._head("chat.completion") | {"choices": choices, "usage": usage}
        if self.scored_prompt is not None:
            scored = generations[0].prompt_logprobs
            whole["prompt_logprobs"] = prompt_logprobs(self.tokens, self.scored_prompt, scored)
        return whole

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        reply = read_whole(self.new_reader(), generation.text)
        message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
        message["refusal"] = None
        if reply.reasoning and self.has_reasoning:
            message |= {"reasoning_content": reply.reasoning, "reasoning": reply.reasoning}
        if reply.calls:
            message["tool_calls"] = reply.calls
        reason = finish_reason_of(generation)
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self.tokens, generation.logprobs),
            "finish_reason": "tool_calls" if reply.calls and reason == "stop" else reason,
        }

    def opening(self, piece: Piece) -> dict[str, Any]:
        return self._chunk(piece.index, {"role": "assistant", "content": "", "refusal": None})

    def pieces(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the chunks for the new text of one choice after a step.

        There are none while the text may begin a mark.
        """
        reader = self._readers.get(piece.index)
        if reader is None:
            reader = self._readers[piece.index] = self.new_reader()
        parts = reader.feed(piece.text)
        if piece.is_last:
            parts += reader.close()
        untold = self._untold.setdefault(piece.index, [])
        untold += piece.logprobs
        shown = [part for part in parts if self.has_reasoning or not part.reasoning]
        deltas = [_delta(part) for part in shown] or ([{"content": ""}] if untold and piece.is_last else [])
        chunks = [self._chunk(piece.index, delta) for delta in deltas]
        if chunks and untold:
            chunks[0]["choices"][0]["logprobs"] = chat_logprobs(self.tokens, untold)
            untold.clear()
        if piece.is_last:
            reason = finish_reason_of(piece.generation)
            reason = "tool_calls" if reader.has_calls and reason == "stop" else reason
            chunks.append(self._chunk(piece.index, {}, reason))
        return chunks

    def progress(self, index: int, progress: dict[str, int]) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": None}) | {"prompt_progress": progress}

    def usage(self, usage: dict[str, object]) -> dict[str, Any]:
        return self._head("chat.completion.chunk") | {"choices": [], "usage": usage}

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._head("chat.completion.chunk") | {"choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _delta(part: Part) -> dict[str, Any]:
    if part.reasoning:
        return {"reasoning_content": part.reasoning, "reasoning": part.reasoning}
    if part.call is not None:
        return {"tool_calls": [_call_delta(part.call)]}
    return {"content": part.content}


def _call_delta(call: CallPart) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": id_of(call), "type": "function", "function": function}
