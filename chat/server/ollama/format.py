"""Writes replies for Ollama's clients: one object, or one on each line of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from hybridmem.chat.engine.engine import Generation
from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.chat.sampling.token_bytes import TokenBytes
from hybridmem.chat.server.chat_format import read_whole
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.formats import finish_reason_of
from hybridmem.chat.server.logprobs import chat_logprobs
from hybridmem.chat.server.ollama.errors import ollama_error
from hybridmem.chat.server.replies import Piece
from hybridmem.chat.server.streams import Usage
from hybridmem.chat.tools.calls import parse_json
from hybridmem.chat.tools.reading import Part, Reader


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass
class OllamaFormat:
    """Writes the reply of one request.

    Attributes:
        is_chat: whether the reply is a message, as at /api/chat, or text, as at /api/generate.
        tokens: the model's tokens, for log probabilities.
        new_reader: makes the reader of the reply. None: the reply is plain text.
    """

    model: str
    is_chat: bool
    tokens: TokenBytes
    new_reader: Callable[[], Reader] | None
    _reader: Reader | None = None
    _calls: list[list[str]] = field(default_factory=list)  # These are the name and the arguments of each call so far.
    _n_told: int = 0  # This many calls have been sent. A call is sent when it is complete.
    _reason: str | None = None

    def whole(self, generations: list[Generation], usage: dict[str, Any]) -> dict[str, Any]:
        (generation,) = generations
        if self.new_reader is None:
            told = self._reply(generation.text)
        else:
            said = read_whole(self.new_reader(), generation.text)
            calls = [(call["function"]["name"], call["function"]["arguments"]) for call in said.calls]
            told = self._reply(said.content, said.reasoning, [_call(*call) for call in calls])
        return (
            self._head() | told | self._logprobs(generation.logprobs) | self._end(finish_reason_of(generation), usage)
        )

    def begin(self) -> str:
        self._reader = None if self.new_reader is None else self.new_reader()
        return ""

    def wait(self) -> str:
        return ""  # Send nothing: each line of a stream is an object, which clients take for a part of the reply.

    def add(self, piece: Piece, usage: Usage) -> str:
        if self._reader is None:
            parts = [Part(content=piece.text)] if piece.text else []
        else:
            parts = self._reader.feed(piece.text)
            parts += self._reader.close() if piece.is_last else []
        if piece.is_last:
            self._reason = finish_reason_of(piece.generation)
        told = [line for part in parts for line in self._tell(part)]
        if told and piece.logprobs:
            told[0] |= self._logprobs(list(piece.logprobs))
        return "".join(map(self._line, told))

    def end(self, usage: Usage) -> str:
        calls = self._whole_calls(len(self._calls))
        last = self._reply("") | self._end(self._reason, usage())
        return (self._line(self._reply("", "", calls)) if calls else "") + self._line(last, is_done=True)

    def fail(self, error: ApiError) -> str:
        return json.dumps(ollama_error(error)) + "\n"

    def _tell(self, part: Part) -> list[dict[str, Any]]:
        if part.call is None:
            return [self._reply(part.content, part.reasoning)]
        while len(self._calls) <= part.call.index:
            self._calls.append(["", ""])
        self._calls[part.call.index][0] += part.call.name
        self._calls[part.call.index][1] += part.call.arguments
        calls = self._whole_calls(part.call.index)
        return [self._reply("", "", calls)] if calls else []

    def _whole_calls(self, n_whole: int) -> list[dict[str, Any]]:
        """Return the calls before number `n_whole` that have not been sent yet."""
        calls = [_call(*call) for call in self._calls[self._n_told : n_whole]]
        self._n_told = max(self._n_told, n_whole)
        return calls

    def _reply(self, content: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self.is_chat:
            return {"response": content} | more
        more |= {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": content} | more}

    def _logprobs(self, chosen: list[Chosen]) -> dict[str, Any]:
        told = chat_logprobs(self.tokens, chosen)
        return {} if told is None else {"logprobs": told["content"]}

    def _head(self) -> dict[str, Any]:
        return {"model": self.model, "created_at": now()}

    def _line(self, told: dict[str, Any], *, is_done: bool = False) -> str:
        return json.dumps(self._head() | told | {"done": is_done}, separators=(",", ":")) + "\n"

    def _end(self, reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        spent = usage["hybrid_memory"]
        seconds = [spent[name] for name in ("queue_seconds", "prefill_seconds", "decode_seconds")]
        return {
            "done": True,
            "done_reason": reason or "stop",
            "total_duration": _nanoseconds(sum(seconds)),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(seconds[1]),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(seconds[2]),
            "hybrid_memory": spent,
        }


def _call(name: str, arguments: str) -> dict[str, Any]:
    try:
        value = parse_json(arguments or "{}")
    except ValueError:
        value = None
    return {"function": {"name": name, "arguments": value if isinstance(value, dict) else {"arguments": arguments}}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
