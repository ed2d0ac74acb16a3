"""Reads the items of requests, which are texts, messages, and calls of functions with their results."""

from __future__ import annotations

import json
from typing import Any

from hybridmem.chat.server.pictures import sees, source_of
from hybridmem.chat.server.schema import MOST_MESSAGES, UNSEEN_IMAGE
from hybridmem.chat.stored.items import picture_part, text_item
from hybridmem.chat.stored.nodes import Item, new_id

REFERENCE = "item_reference"
_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text", "text", "refusal")
_MOST_ID = 64
_HOSTED = (
    "code_interpreter_call", "compaction", "computer_call", "computer_call_output", "file_search_call",
    "image_generation_call", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools",
    "tool_search_call", "tool_search_output", "web_search_call",
)  # fmt: skip
"""The types of items that are calls of tools which other servers ran."""
_UNSEEN = ("input_image", "input_file", "input_audio")


def read_input(value: object) -> list[Item]:
    """Read the `input` of a response, which is a user's text or a list of items. Raises ValueError.

    References to stored items stay as they are. They are replaced by the items when the store is read.
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


def split_items(value: object) -> tuple[object, list[str]]:
    """Remove calls of tools that other servers ran from a request's items.

    Return the other items, and what was left out.

    No template can write such calls, and later replies say what they found.
    """
    if not isinstance(value, list):
        return value, []
    kinds = [item.get("type") if isinstance(item, dict) else None for item in value]
    left_out = sorted({kind for kind in kinds if isinstance(kind, str) and kind in _HOSTED})
    kept = [item for item, kind in zip(value, kinds, strict=True) if kind not in left_out]
    return kept, [f"input: items of the type {kind!r} are calls of other servers" for kind in left_out]


def _read_reference(item: Item) -> Item:
    if not isinstance(item.get("id"), str) or item.keys() != {"type", "id"}:
        raise ValueError("an item_reference has the 'id' of a stored item, and nothing else")
    return item


def _read_item(item: object) -> Item:
    if not isinstance(item, dict):
        raise ValueError("it must be an object, such as {'role': 'user', 'content': 'Hello'}")
    kind = item.get("type", "message")
    kind, item = _as_function(kind, item) if isinstance(kind, str) else (kind, item)
    readers = {
        "message": _read_message, "function_call": _read_call, "function_call_output": _read_output,
        "reasoning": _read_reasoning,
    }  # fmt: skip
    if not isinstance(kind, str) or kind not in readers:
        raise ValueError(f"items of the type {str(kind)[:40]!r} are not supported; those of {', '.join(readers)} are")
    return {"id": _read_id(item), "type": kind, **readers[kind](item)}


def _as_function(kind: str, item: Item) -> tuple[str, Item]:
    """Turn a call of a tool that takes text or a command, or the result of such a call, into that of a function."""
    if kind == "custom_tool_call" and isinstance(item.get("input"), str):
        return "function_call", {**item, "arguments": json.dumps({"input": item["input"]}, ensure_ascii=False)}
    if kind == "local_shell_call" and isinstance(item.get("action"), dict):
        return "function_call", {**item, "name": "local_shell", "arguments": json.dumps(item["action"])}
    if kind in ("custom_tool_call_output", "local_shell_call_output"):
        return "function_call_output", item
    return kind, item


def _read_id(item: Item) -> str:
    """Return a new id. A client's own id might be that of a stored item, or of somebody else's."""
    kinds = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
    given = item.get("id")
    if given is not None and not (isinstance(given, str) and len(given) <= 2 * _MOST_ID):
        raise ValueError("its 'id' must be a string")
    return new_id(kinds.get(str(item.get("type")), "msg"))


def _read_message(item: Item) -> Item:
    if item.get("role") not in _ROLES:
        raise ValueError(f"its 'role' must be one of {', '.join(_ROLES)}")
    role, content = item["role"], item.get("content")
    if isinstance(content, str):
        content = [{"type": "output_text" if role == "assistant" else "input_text", "text": content}]
    content = [] if content is None else content
    if not isinstance(content, list):
        raise ValueError("its 'content' must be a string, or a list of {'type': 'input_text', 'text': ...}")
    return {"role": role, "status": "completed", "content": [_read_part(part, role) for part in content]}


def read_content(value: object) -> str:
    """Read a text, given whole or in parts. Raises ValueError."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("it must be a string, or a list of {'type': 'input_text', 'text': ...}")
    return "".join(_read_part(part, "assistant")["text"] for part in value)


def _read_part(part: object, role: str) -> Item:
    if isinstance(part, dict) and part.get("type") == "input_image" and role != "assistant" and sees():
        source = source_of(part)
        return picture_part(source.url, source.detail)
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
    namespace = {"namespace": item["namespace"]} if isinstance(item.get("namespace"), str) else {}
    return {**fields, **namespace, "status": "completed"}


def _read_output(item: Item) -> Item:
    call_id, output = item.get("call_id"), item.get("output")
    if not isinstance(call_id, str):
        raise ValueError("a function_call_output has a string as its 'call_id'")
    try:
        text = read_content(_with_unseen(output))
    except ValueError as error:
        raise ValueError(f"its 'output': {error}") from None
    return {"call_id": call_id, "output": text, "status": "completed"}


def _with_unseen(output: object) -> object:
    """Return the result of a tool with a text in place of each image.

    If images were refused, no session with one could continue.
    """
    if not isinstance(output, list):
        return output
    told = {"type": "input_text", "text": UNSEEN_IMAGE}
    return [told if isinstance(part, dict) and part.get("type") in _UNSEEN else part for part in output]


def _read_reasoning(item: Item) -> Item:
    """Keep thoughts that a client sends back.

    Templates leave out the thoughts of earlier replies, and so does a prompt.
    """
    kept: dict[str, Any] = {name: item.get(name) or [] for name in ("summary", "content")}
    if not all(isinstance(parts, list) and len(json.dumps(parts)) < 1 << 20 for parts in kept.values()):
        raise ValueError("a reasoning item has lists of parts as its 'summary' and 'content'")
    return kept
