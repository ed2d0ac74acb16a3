"""Renders chat templates, and finds out what they write."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from typing import Any

_ROLES = "user", "assistant", "system", "tool", "developer"


def apply_template(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """Return messages as text. A template is a program of the checkpoint, and may raise anything."""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def template_text(tokenizer: Any) -> str:
    """Return the source of the chat template, or of all of them if the tokenizer has several with names."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


def find_turn_end(tokenizer: Any) -> int | None:
    """Return the token that the chat template writes right behind a reply; None if that is no added token."""
    reply = "x7e2"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": reply}, {"role": "user", "content": "b"}]
    # A template is a program of the checkpoint, and may refuse this chat.
    with suppress(Exception):
        rendered = apply_template(tokenizer, chat, add_generation_prompt=True)
        first = tokenizer.encode(rendered.partition(reply)[2].lstrip(), add_special_tokens=False)[0]
        return int(first) if first in tokenizer.added_tokens_decoder else None
    return None


def rendered_samples(tokenizer: Any) -> str:
    """Return what the chat templates write around messages of each role.

    A template may put a mark together from parts, such as "<|" + role + "|>": its source does not hold the mark's name.
    """
    template = getattr(tokenizer, "chat_template", None)
    names = [None] if isinstance(template, str) else [*(template or ())]
    chats: list[list[dict[str, Any]]] = [[{"role": role, "content": "x"}] for role in _ROLES]
    chats += [[*chats[0], *chat] for chat in chats[1:]]
    chats.append([{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")])
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
    called = {"role": "assistant", "content": "", "reasoning_content": "x", "tool_calls": [call]}
    chats.append([*chats[0], called, {"role": "tool", "name": "f", "tool_call_id": call["id"], "content": "x"}])
    schema = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}}
    tool = {"type": "function", "function": {"name": "f", "description": "x", "parameters": schema}}
    texts = list[str]()
    for name, chat, awaits_reply in product(names, chats, (False, True)):
        # A template is a program of the checkpoint, and refuses most of these orders of roles.
        with suppress(Exception):
            more = {"tools": [tool]} if chat is chats[-1] else {}
            texts.append(
                apply_template(tokenizer, chat, chat_template=name, add_generation_prompt=awaits_reply, **more)
            )
    return "\n".join(texts)
