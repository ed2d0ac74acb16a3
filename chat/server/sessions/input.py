"""Reads the items of requests, which are texts, messages, and calls of functions with their results."""

from __future__ import annotations

import json
from typing import Any

from hybridmem.chat.server.schema import MOST_MESSAGES
from hybridmem.chat.stored.items import text_item
from hybridmem.chat.stored.nodes import Item, new_id

REFERENCE = "item_reference"
_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text", "text", "refusal")
_MOST_ID = 64


def read_input(value: object) -> list[Item]:
    """Read the `input` of a response, which is a user's text or a list of items. Raises ValueError.

    References to stored items stay as they are. Whoever reads the store replaces them by the items.
    """
    if isinstance(value, str):
        return [text_item("user", value)]
    return read_items(value, may_refer=True)


def read_items(value: object, *, may_refer: bool = False) -> list[Item]:
    """Read a list of items. Raises ValueError; the message names the item that cannot be read."""
    if not isinstance(value, list):
        raise ValueError("it must be a string, or a list of items")
    if len(value) > MOST_MESSAGES:
        raise ValueError(f"it has {len(value):,} items; {MOST_MESSAGES:,} are possible")
    items = list[Item]()
    for number, item in enumerate(value):
        try:
            is_reference = may_refer and isinstance(item, dict) and item.get("type") == REFERENCE
            items.append(_read_reference(item) if is_reference else _read_item(item))
        except ValueError as error:
            raise ValueError(f"item {number}: {error}") from None
    return items


def _read_reference(item: Item) -> Item:
    if not isinstance(item.get("id"), str) or item.keys() != {"type", "id"}:
        raise ValueError("an item_reference has the 'id' of a stored item, and nothing else")
    return item


def _read_item(item: object) -> Item:
    if not isinstance(item, dict):
        raise ValueError("it must be an object, such as {'role': 'user', 'content': 'Hello'}")
    kind = item.get("type", "message")
    readers = {
        "message": _read_message, "function_call": _read_call, "function_call_output": _read_output,
        "reasoning": _read_reasoning,
    }  # fmt: skip
    if not isinstance(kind, str) or kind not in readers:
        raise ValueError(f"items of the type {str(kind)[:40]!r} are not supported; those of {', '.join(readers)} are")
    return {"id": _read_id(item), "type": kind, **readers[kind](item)}


def _read_id(item: Item) -> str:
    """Return a new id. A client's own id might be that of a stored item, or of somebody else's."""
    kinds = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
    given = item.get("id")
    if given is not None and not (isinstance(given, str) and len(given) <= 2 * _MOST_ID):
        raise ValueError("its 'id' must be a string")
    return new_id(kinds.get(str(item.get("type")), "msg"))


def _read_message(item: Item) -> Item:
    unknown = sorted(item.keys() - {"type", "id", "role", "content", "status", "phase", "name"})
    if unknown:
        raise ValueError(f"{str(unknown[0])[:40]!r} is no field of a message")
    if item.get("role") not in _ROLES:
        raise ValueError(f"its 'role' must be one of {', '.join(_ROLES)}")
    role, content = item["role"], item.get("content")
    if isinstance(content, str):
        content = [{"type": "output_text" if role == "assistant" else "input_text", "text": content}]
    if not isinstance(content, list) or not content:
        raise ValueError("its 'content' must be a string, or a list of {'type': 'input_text', 'text': ...}")
    return {"role": role, "status": "completed", "content": [_read_part(part, role) for part in content]}


def read_content(value: object) -> str:
    """Read a text, given whole or in parts. Raises ValueError."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a string, or a list of {'type': 'input_text', 'text': ...}")
    return "".join(_read_part(part, "user")["text"] for part in value)


def _read_part(part: object, role: str) -> Item:
    if not isinstance(part, dict) or part.get("type") not in _PARTS:
        given = part.get("type") if isinstance(part, dict) else part
        raise ValueError(f"only parts with text are supported, of the type 'input_text'; got {str(given)[:40]!r}")
    text = part.get("refusal" if part["type"] == "refusal" else "text")
    if not isinstance(text, str):
        raise ValueError(f"a part of the type {part['type']!r} has a string as its text")
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def _read_call(item: Item) -> Item:
    fields = {name: item.get(name) for name in ("call_id", "name", "arguments")}
    wrong = next((name for name, value in fields.items() if not isinstance(value, str)), None)
    if wrong is not None:
        raise ValueError(f"a function_call has a string as its {wrong!r}")
    return {**fields, "status": "completed"}


def _read_output(item: Item) -> Item:
    call_id, output = item.get("call_id"), item.get("output")
    if not isinstance(call_id, str):
        raise ValueError("a function_call_output has a string as its 'call_id'")
    try:
        text = read_content(output)
    except ValueError as error:
        raise ValueError(f"its 'output': {error}") from None
    return {"call_id": call_id, "output": text, "status": "completed"}


def _read_reasoning(item: Item) -> Item:
    """Keep thoughts that a client sends back.

    Templates leave out the thoughts of earlier replies, and so does a prompt.
    """
    kept: dict[str, Any] = {name: item.get(name) or [] for name in ("summary", "content")}
    if not all(isinstance(parts, list) and len(json.dumps(parts)) < 1 << 20 for parts in kept.values()):
        raise ValueError("a reasoning item has lists of parts as its 'summary' and 'content'")
    return kept
