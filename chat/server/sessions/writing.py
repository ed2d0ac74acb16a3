"""Writes the text, thoughts and calls of a reply as they come, as items and as events of these items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybridmem.chat.server.sessions.objects import Events
from hybridmem.chat.stored.items import joined_name
from hybridmem.chat.stored.nodes import Item
from hybridmem.chat.tools.calls import CallPart
from hybridmem.chat.tools.reading import Part

_CALL_ID_LENGTH = len("call_") + 24


class Writing:
    """Makes the output of one response from the parts of its reply.

    Args:
        new_id: draws the ids of items.
        namespaces: the namespace of each tool that has one, by the name that the model knows.
    Attributes:
        items: the output so far. The last item may be open.
    """

    def __init__(
        self, events: Events, new_id: Callable[[str], str], namespaces: Mapping[str, str] | None = None
    ) -> None:
        self.items: list[Item] = []
        self._events = events
        self._new_id = new_id
        self._namespaces = namespaces or {}
        self._is_open = False
        self._n_calls = 0

    def add(self, part: Part) -> list[str]:
        """Add a part, and return its events."""
        if part.call is not None:
            return self._add_call(part.call)
        kind, text = ("reasoning", part.reasoning) if part.reasoning else ("message", part.content)
        if not text:
            return []
        written = self._open_text(kind)
        self.items[-1]["content"][0]["text"] += text
        return [*written, self._write_text(kind, "delta", delta=text)]

    def close(self, *, is_whole: bool) -> list[str]:
        """End the reply. A reply without items gets an empty message.

        A reply that was cut gets the status `incomplete`.
        """
        written = [] if self.items else self._open_text("message")
        return [*written, *self._close("completed" if is_whole else "incomplete")]

    def _open_text(self, kind: str) -> list[str]:
        if self._is_open and self.items[-1]["type"] == kind:
            return []
        if kind == "message":
            part: Item = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            written = self._open({"id": self._new_id("msg"), "type": kind, "role": "assistant"}, content=[])
        else:
            part = {"type": "reasoning_text", "text": ""}
            written = self._open({"id": self._new_id("rs"), "type": kind, "summary": []}, content=[])
        self.items[-1]["content"].append(part)
        return [*written, self._write("content_part.added", content_index=0, part=dict(part))]

    def _add_call(self, call: CallPart) -> list[str]:
        written = list[str]()
        if call.index >= self._n_calls:
            self._n_calls = call.index + 1
            call_id = self._new_id("call")[:_CALL_ID_LENGTH]
            about = {"id": self._new_id("fc"), "type": "function_call", "call_id": call_id, **self._named(call.name)}
            written = self._open(about, arguments="")
        self.items[-1]["arguments"] += call.arguments
        if call.arguments:
            written.append(self._write("function_call_arguments.delta", delta=call.arguments))
        return written

    def _named(self, name: str) -> Item:
        """Return the fields by which a client knows a tool."""
        namespace = self._namespaces.get(name)
        if namespace is None:
            return {"name": name}
        return {"name": name.removeprefix(joined_name(namespace, "")), "namespace": namespace}

    def _open(self, item: Item, **empty: Any) -> list[str]:
        written = self._close("completed")
        self.items.append({**item, "status": "in_progress", **empty})
        self._is_open = True
        return [*written, self._events.write("response.output_item.added", output_index=self._at, item=self._shown())]

    def _close(self, status: str) -> list[str]:
        if not self._is_open:
            return []
        item, self._is_open = self.items[-1], False
        item["status"] = status
        if item["type"] == "function_call":
            done = self._write("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
            return [done, self._done()]
        (part,) = item["content"]
        return [
            self._write_text(item["type"], "done", text=part["text"]),
            self._write("content_part.done", content_index=0, part=part),
            self._done(),
        ]

    def _done(self) -> str:
        return self._events.write("response.output_item.done", output_index=self._at, item=self._shown())

    def _write_text(self, kind: str, what: str, **values: Any) -> str:
        if kind == "reasoning":
            return self._write(f"reasoning_text.{what}", content_index=0, **values)
        return self._write(f"output_text.{what}", content_index=0, logprobs=[], **values)

    def _write(self, kind: str, **values: Any) -> str:
        return self._events.write(f"response.{kind}", item_id=self.items[-1]["id"], output_index=self._at, **values)

    @property
    def _at(self) -> int:
        return len(self.items) - 1

    def _shown(self) -> Item:
        item = self.items[-1]
        return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
