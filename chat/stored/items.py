"""Turns items of OpenAI's Responses into nodes, and into messages in the form that chat templates know."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from hybridmem.chat.special_tokens.marks import mark_of, name_of_source
from hybridmem.chat.stored.nodes import Item, Node, Role, new_id
from hybridmem.chat.tools.calls import parse_json

_MOST_TITLE = 60


def role_of(item: Item) -> Role:
    """Return the role of an item. "developer" is the new name of "system", and calls are the assistant's."""
    if item["type"] == "message":
        roles: dict[str, Role] = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
        return roles[item["role"]]
    return "tool" if item["type"] == "function_call_output" else "assistant"


def text_of(items: Iterable[Item]) -> str:
    """Return the text of items that a reader sees."""
    return "\n".join(text for item in items if (text := _text_of(item)))


def _text_of(item: Item) -> str:
    if item["type"] == "message":
        return "".join(part.get("text", part.get("refusal", "")) for part in item["content"])
    if item["type"] == "function_call":
        return f"{item['name']}({item['arguments']})"
    if item["type"] == "function_call_output":
        return str(item["output"])
    return ""


def pictures_in(item: Item) -> list[tuple[str, str]]:
    """Return the URL and the detail of each picture in an item."""
    parts = item["content"] if item["type"] == "message" else []
    return [(part["image_url"], part["detail"]) for part in parts if part.get("type") == "input_image"]


def _content_of(item: Item) -> str:
    """Return the content of a message, with marks in the places of its pictures."""
    if not pictures_in(item):
        return _text_of(item)
    return "".join(
        mark_of(name_of_source(part["image_url"], part["detail"])) if part["type"] == "input_image" else part["text"]
        for part in item["content"]
    )


def make_nodes(session: str, parent: str | None, items: list[Item]) -> list[Node]:
    """Return a node for each run of items with one role. Each node is the parent of the next."""
    nodes = list[Node]()
    for role, run in groupby(items, role_of):
        parent_id = nodes[-1].id if nodes else parent
        nodes.append(Node(new_id("turn"), session, parent_id, role, list(run)))
    return nodes


def make_title(items: Iterable[Item]) -> str:
    """Return the first title of a session, which is the beginning of its user's first message."""
    said = " ".join(text_of(item for item in items if role_of(item) == "user").split())
    return said if len(said) <= _MOST_TITLE else said[: _MOST_TITLE - 1] + "…"


def picture_part(url: str, detail: str) -> Item:
    """Return a part of a message with a picture."""
    return {"type": "input_image", "image_url": url, "detail": detail}


def text_item(role: str, text: str) -> Item:
    """Return a message with one text."""
    part: Item = {"type": "input_text", "text": text}
    if role == "assistant":
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": new_id("msg"), "type": "message", "role": role, "status": "completed", "content": [part]}


def joined_name(namespace: str, name: str) -> str:
    """Return the name by which a model knows a tool of a namespace."""
    return f"{namespace}__{name}"


def as_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Turn items into messages in the form that templates know. Calls join the message that they follow."""
    messages = list[dict[str, Any]]()
    for item in items:
        if item["type"] == "message":
            messages.append({"role": role_of(item), "content": _content_of(item)})
        elif item["type"] == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            name = joined_name(item["namespace"], item["name"]) if item.get("namespace") else item["name"]
            function = {"name": name, "arguments": _arguments_of(item)}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif item["type"] == "function_call_output":
            messages.append({"role": "tool", "content": _text_of(item), "tool_call_id": item["call_id"]})
    return messages


def _arguments_of(item: Item) -> dict[str, Any]:
    """Return the arguments of a call as an object, which templates write as JSON."""
    try:
        arguments = parse_json(item["arguments"])
    except ValueError:  # The reply was cut, or the arguments are not valid JSON, so no template could write them.
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": item["arguments"]}
