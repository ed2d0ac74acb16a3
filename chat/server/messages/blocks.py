"""Translates Anthropic's messages, whose contents are lists of blocks, into messages that chat templates know."""

from __future__ import annotations

import json
from typing import Any

from hybridmem.chat.server.pictures import mark_part, sees
from hybridmem.chat.server.schema import MOST_MESSAGES, UNSEEN_IMAGE

ChatMessage = dict[str, Any]
Block = dict[str, Any]

_BILLING = "x-anthropic-billing-header:"
_ROLES = ("user", "assistant", "system")


def read_messages(value: object) -> list[ChatMessage]:
    """Read the messages of a request, and return them as those of a chat. Raises ValueError."""
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a list of at least one message")
    if len(value) > MOST_MESSAGES:
        raise ValueError(f"it has {len(value):,} messages; {MOST_MESSAGES:,} are possible")
    messages = list[ChatMessage]()
    for number, message in enumerate(value):
        try:
            messages += _read_message(message)
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from None
    return messages


def read_system(value: object) -> str:
    """Read the system prompt, which is a text or a list of blocks of text. Raises ValueError.

    Claude Code's first block is a header for Anthropic's accounts, which differs between versions, hosts and sessions.
    It is no text for a model. If a prompt contained it, no two sessions could share the prefix after it.
    """
    texts = map(_read_text, _blocks_of(value))
    return "\n\n".join(text for text in texts if not text.startswith(_BILLING))


def with_system_first(system: str, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with one system message first: the system prompt, and all system messages before a reply.

    Claude Code says which agents and skills there are after the user's first words. That is most of its prompt, and
    the same in every session. Before the user's words, all sessions share it. Later system messages stay in place.
    """
    n_opening = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    opening = messages[:n_opening]
    said = [text for text in (system, *(m["content"] for m in opening if m["role"] == "system")) if text]
    first = [{"role": "system", "content": "\n\n".join(said)}] if said else []
    return [*first, *(m for m in opening if m["role"] != "system"), *messages[n_opening:]]


def _read_message(message: object) -> list[ChatMessage]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise ValueError(f"its 'role' must be one of {', '.join(_ROLES)}")
    if unknown := sorted(message.keys() - {"role", "content", "id", "type", "cache_control"}):
        raise ValueError(f"{unknown[0][:40]!r} is no field of a message")
    blocks = _blocks_of(message.get("content"))
    if message["role"] == "assistant":
        return [_read_reply(blocks)]
    if message["role"] == "system":
        return [{"role": "system", "content": "\n\n".join(map(_read_text, blocks))}]
    return _read_turn(blocks)


def _blocks_of(value: object) -> list[Block]:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}] if value else []
    if not isinstance(value, list):
        raise ValueError("its 'content' must be a string, or a list of blocks")
    for block in value:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise ValueError("a block is an object with a 'type', such as {'type': 'text', 'text': ...}")
    return value


def _read_text(block: Block) -> str:
    """Return the text of a block. `cache_control` and citations change nothing, since all prefixes are cached."""
    if block["type"] == "document":
        return _read_document(block)
    if block["type"] == "image":
        return mark_part(block)
    if block["type"] == "search_result":
        return "\n".join([str(block.get("title") or ""), *map(_read_text, _blocks_of(block.get("content")))])
    if block["type"] != "text":
        raise ValueError(f"blocks of the type {block['type'][:40]!r} are not supported here: this model reads text")
    if not isinstance(block.get("text"), str):
        raise ValueError("a block of the type 'text' has a string as its 'text'")
    return str(block["text"])


def _read_document(block: Block) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    heading = str(block.get("title") or "")
    if isinstance(source, dict) and kind == "text" and isinstance(source.get("data"), str):
        return f"{heading}\n{source['data']}" if heading else str(source["data"])
    if isinstance(source, dict) and kind == "content":
        return "\n".join([heading, *map(_read_text, _blocks_of(source.get("content")))]).lstrip("\n")
    raise ValueError("documents are supported as text alone, with a 'source' of the type 'text' or 'content'")


def _read_turn(blocks: list[Block]) -> list[ChatMessage]:
    """Return a user's turn. Each result of a tool is a message of its own; texts between them stay in their order.

    Between two texts is an empty line. No empty line separates a picture from texts, as in other dialects.
    """
    messages = list[ChatMessage]()
    for before, block in zip([None, *(block["type"] for block in blocks)], blocks, strict=False):
        if block["type"] == "tool_result":
            messages.append(_read_result(block))
        elif messages and messages[-1]["role"] == "user":
            seam = "" if "image" in (block["type"], before) else "\n\n"
            messages[-1]["content"] += seam + _read_text(block)
        else:
            messages.append({"role": "user", "content": _read_text(block)})
    return messages or [{"role": "user", "content": ""}]


def _read_result(block: Block) -> ChatMessage:
    if not isinstance(block.get("tool_use_id"), str):
        raise ValueError("a block of the type 'tool_result' names its call by 'tool_use_id'")
    text = "\n".join(map(_read_found, _blocks_of(block.get("content"))))
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


def _read_found(block: Block) -> str:
    """Return the text of a block in the result of a tool."""
    if block["type"] == "image" and not sees():
        return UNSEEN_IMAGE
    return str(block.get("tool_name")) if block["type"] == "tool_reference" else _read_text(block)


def _read_reply(blocks: list[Block]) -> ChatMessage:
    """Return an earlier reply. Encrypted thoughts of other models (`redacted_thinking`) are left out."""
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block in blocks:
        if block["type"] == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise ValueError("a block of the type 'thinking' has a string as its 'thinking'")
            thoughts.append(block["thinking"])
        elif block["type"] == "tool_use":
            calls.append(_read_call(block))
        elif block["type"] != "redacted_thinking":
            texts.append(_read_text(block))
    message: ChatMessage = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _read_call(block: Block) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(block.get("id"), str) or not isinstance(given, dict):
        raise ValueError("a block of the type 'tool_use' has an 'id', a 'name', and an object as its 'input'")
    function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": block["id"], "type": "function", "function": function}
