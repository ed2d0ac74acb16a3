"""Continues the stream of a lost replica with the same reply from another replica. The client gets no text twice.

A greedy or seeded reply depends only on its request, so another replica can make it again, from the last stored turn
on. The gateway records how much of each part of a reply it has sent (text, thoughts, arguments of calls, log
probabilities). It removes that much from the second replica's reply, and compares the texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from starlette.types import Message

from hybridmem.chat.server.formats import as_event
from hybridmem.cluster.serving.continuing_responses import ResponsesSoFar
from hybridmem.cluster.serving.parts import AnotherReplyError, Name, StreamSoFar

RESPONSES = "/v1/responses"
STREAMS = ("/v1/chat/completions", "/v1/completions", RESPONSES)
"""The paths whose streams can be continued."""
END: Message = {"type": "http.response.body", "body": b"", "more_body": False}
_HEAD = ("id", "created")
"""Fields that each replica draws for itself. The client knows those of the first replica."""
_TEXTS = ("content", "reasoning_content", "reasoning", "text")
_EVENT = re.compile(rb"(event: [a-z._]+\n|)data: (.*)\n\n")
_END_OF_EVENT = re.compile(rb"(?<=\n\n)")


class ResponseSoFar:
    """Records which part of a response was sent, and removes that part from another response to the same request.

    The head of a response is held back until its body begins. Until then any other response may replace it.

    Args:
        path: the path of the request.
    Attributes:
        has_begun: whether anything has been sent.
        is_complete: whether the whole response, except for its end, has been sent.
    """

    def __init__(self, path: str) -> None:
        self.has_begun = self.is_complete = False
        self._may_go_on = path in STREAMS
        self._is_stream = False
        self._held: list[Message] = []
        self._reply: StreamSoFar = ResponsesSoFar() if path == RESPONSES else ReplySoFar()

    @property
    def can_go_on(self) -> bool:
        """Return whether another replica can take over now."""
        return not self.has_begun or (self._is_stream and self._may_go_on)

    def begin_again(self) -> None:
        """Treat the next messages as those of another response."""
        self._held = []
        if self.has_begun:
            self._reply.begin_again()

    def news_in(self, messages: list[Message]) -> list[Message]:
        """Return the part of these messages that the client does not have yet. Raises AnotherReplyError."""
        found: list[Message] = []
        for message in messages:
            if message["type"] == "http.response.start":
                self._take_head(message)
                continue
            if not self.has_begun:
                found, self.has_begun = self._held, True
            rest = self._rest_of(message)
            found += [] if rest is None else [rest]
        return found

    def _take_head(self, message: Message) -> None:
        kinds = [value for name, value in message.get("headers", []) if name.lower() == b"content-type"]
        is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        if self.has_begun:
            if not is_stream:
                raise AnotherReplyError(f"status {message['status']}")
            return
        self._is_stream = is_stream
        self._held.append(message)

    def _rest_of(self, message: Message) -> Message | None:
        """Return the unsent part of a message. A stream's message may hold several events."""
        body = message.get("body", b"")
        if not (self._is_stream and self._may_go_on):
            return message
        rest = b"".join(map(self._rest_of_event, _END_OF_EVENT.split(body)))
        return None if body and not rest else {**message, "body": rest}

    def _rest_of_event(self, line: bytes) -> bytes:
        found = _EVENT.fullmatch(line)
        if found is None:
            return line
        name, data = found[1], found[2]
        if data == b"[DONE]":
            self.is_complete = True
            return line
        event = json.loads(data)
        rest = self._reply.rest_of(event)
        self.is_complete |= self._reply.is_end(event)
        if rest is None or rest is event:
            return line if rest is event else b""
        return name + as_event(rest).encode()


class ReplySoFar(StreamSoFar):
    """Records the events of a stream of completions."""

    def __init__(self) -> None:
        super().__init__()
        self._head: dict[str, Any] = {}

    def is_end(self, event: dict[str, Any]) -> bool:
        return False  # These streams end with a line that is no event.

    def rest_of(self, event: dict[str, Any]) -> dict[str, Any] | None:
        if "error" in event:
            return event
        self._head = self._head or {name: event[name] for name in _HEAD}
        if "prompt_progress" in event:
            return event if self.is_first else None
        choices = [choice for choice in event["choices"] if self._keep(choice)]
        if self.is_first:
            return event
        return event | self._head | {"choices": choices} if choices or not event["choices"] else None

    def _keep(self, choice: dict[str, Any]) -> bool:
        """Remove the sent parts from a choice. Return whether anything is left."""
        index, is_new = choice["index"], False
        for name, holder, key in _parts_of(choice):
            holder[key] = self.rest_of_part((index, *name), holder[key])
            is_new |= bool(holder[key])
        if "role" in choice.get("delta", {}):
            is_new |= self.is_unseen(index, "opening")
        if choice["finish_reason"] is not None:
            if any(part.at < part.n_told for name, part in self.parts.items() if name[0] == index):
                raise AnotherReplyError("it ends before what has been sent")
            is_new |= self.is_unseen(index, "end")
        return is_new


def _parts_of(choice: dict[str, Any]) -> Iterator[tuple[Name, dict[str, Any], str]]:
    """Yield each part of a reply that an event continues: its name, the dict that holds it, and the key there."""
    body = choice.get("delta", choice)
    for name in _TEXTS:
        if isinstance(body.get(name), str):
            yield (name,), body, name
    for call in body.get("tool_calls", ()):
        for name in call["function"]:
            yield ("call", call["index"], name), call["function"], name
    for name, value in (choice.get("logprobs") or {}).items():
        if isinstance(value, list):
            yield ("logprobs", name), choice["logprobs"], name
