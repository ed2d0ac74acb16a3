"""Compares histories: finds which messages of a chat are on a stored path, even if their ids and thoughts differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from hybridmem.chat.server.chat_format import ReplyContent
from hybridmem.chat.server.pictures import Sources
from hybridmem.chat.server.schema import UNSEEN_IMAGE, Message
from hybridmem.chat.special_tokens.marks import names_in, split_at_marks, without_marks
from hybridmem.chat.stored.items import joined_name, picture_part, role_of, text_item
from hybridmem.chat.stored.nodes import Item, Node, new_id
from hybridmem.chat.tools.calls import parse_json

Group = list[Item]
"""The items of one turn, which is one node of a session."""


def items_of(messages: Iterable[Message], sources: Sources) -> list[Item]:
    """Return the messages of a chat as items of a session, with its pictures."""
    items = list[Item]()
    for message in messages:
        if message.role == "tool":
            output = without_marks(message.content, UNSEEN_IMAGE)
            result = {"call_id": message.tool_call_id, "output": output, "status": "completed"}
            items.append({"id": new_id("fco"), "type": "function_call_output", **result})
            continue
        if message.content or not message.tool_calls:
            items.append(_message_item(message, sources))
        for call in message.tool_calls:
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            items.append(_call_item(call["id"], call["function"]["name"], arguments))
    return items


def _message_item(message: Message, sources: Sources) -> Item:
    item, parts = text_item(message.role, message.content), list[Item]()
    if not names_in(message.content):
        return item
    for start, end, name in split_at_marks(message.content, 0, len(message.content)):
        if name in sources:
            parts.append(picture_part(sources[name].url, sources[name].detail))
        elif start < end:
            parts += text_item(message.role, message.content[start:end])["content"]
    return item | {"content": parts}


def items_of_reply(reply: ReplyContent, beginning: str) -> list[Item]:
    """Return the items of a reply, which may continue a beginning that its request gave."""
    items = list[Item]()
    if reply.reasoning:
        part = {"type": "reasoning_text", "text": reply.reasoning}
        about = {"type": "reasoning", "summary": [], "status": "completed"}
        items.append({"id": new_id("rs"), **about, "content": [part]})
    if reply.content or beginning or not reply.calls:
        items.append(text_item("assistant", beginning + reply.content))
    for call in reply.calls:
        items.append(_call_item(call["id"], call["function"]["name"], call["function"]["arguments"]))
    return items


def _call_item(call_id: str, name: str, arguments: str) -> Item:
    about = {"call_id": call_id, "name": name, "arguments": arguments, "status": "completed"}
    return {"id": new_id("fc"), "type": "function_call", **about}


def groups_of(items: Iterable[Item]) -> list[Group]:
    """Return the turns of a history."""
    return [list(run) for _, run in groupby(items, role_of)]


def digests_of(start: bytes, groups: Iterable[Group]) -> list[bytes]:
    """Return a digest of each prefix of a history's turns, the shortest prefix first."""
    digests, at = list[bytes](), start
    for group in groups:
        at = digest_behind(at, group)
        digests.append(at)
    return digests


def digest_behind(before: bytes, group: Group) -> bytes:
    return hashlib.sha256(before + json.dumps(list(_told(group))).encode(errors="surrogatepass")).digest()


def digests_of_tree(start: bytes, nodes: Iterable[Node]) -> dict[bytes, str]:
    """Return the digest of the path to each node of a tree. Each node comes after its parent."""
    found = dict[str | None, bytes]({None: start})
    for node in nodes:
        found[node.id] = digest_behind(found[node.parent], node.items)
    return {digest: node_id for node_id, digest in found.items() if node_id is not None}


def _told(group: Group) -> Iterator[Any]:
    """Yield what is compared of a turn: its texts, calls and results.

    Ids and thoughts are not compared, because clients change ids and leave thoughts out.
    """
    for item in group:
        if item["type"] == "message":
            text = "".join(part.get("text", "") for part in item["content"]).strip()
            if text:
                yield role_of(item), text
        elif item["type"] == "function_call":
            name = joined_name(item["namespace"], item["name"]) if item.get("namespace") else item["name"]
            yield "call", name, _normal(item["arguments"])
        elif item["type"] == "function_call_output":
            yield "result", str(item["output"]).strip()


def _normal(arguments: str) -> str:
    """Return arguments in one spelling."""
    try:
        return json.dumps(parse_json(arguments), sort_keys=True)
    except ValueError:
        return arguments
