"""Makes the prompt behind a stored reply from the token ids of that reply, so that nothing before it changes.

A template renders a whole history, and may render it otherwise than the model has seen it: without thoughts, say. And a
text that the model has written may be cut into other tokens when it is encoded again. So the history is not encoded
again: the prompt is what was stored, and what the template writes behind the last reply. That text is found by
rendering placeholders instead of the replies whose token ids are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from hybridmem.chat.stored.nodes import Node
from hybridmem.memory import FormatError
from hybridmem.memory.blocks.arrays import Int64s

Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], str]
"""Renders messages; with True, with the opening of a reply behind them."""


@dataclass(frozen=True)
class Prompt:
    """Holds the token ids of a prompt, and where they come from.

    Attributes:
        base: the reply whose stored token ids it begins with; None: all of it was encoded now.
        n_kept: how many of them it begins with.
        history: in words, whether it continues from stored token ids, and why not.
    """

    token_ids: list[int]
    base: str | None
    n_kept: int
    history: str


def rest_behind(render: Render, before: Messages, after: Messages) -> tuple[str, Messages, int]:
    """Return the rendered text of a chat with a placeholder for its last stored reply, and where that reply ends.

    Args:
        before: the messages before the reply, those of stored replies as placeholders.
        after: the messages behind it.
    Raises:
        FormatError: the template does not render what was before the reply as it did then; the message says so.
    """
    placeholder = uuid4().hex
    messages = [*before, {"role": "assistant", "content": placeholder}, *after]
    text = render(messages, True)
    if text.count(placeholder) != 1:
        raise FormatError("the chat template does not write the earlier reply once, so it is rendered anew")
    start = text.index(placeholder)
    if not text[:start].startswith(render(before, False)):
        raise FormatError("the chat template renders what is before the earlier reply otherwise now")
    return text, messages, start + len(placeholder)


def behind_reply(stored: Int64s, new: list[int], stop_ids: tuple[int, ...]) -> tuple[list[int], int]:
    """Join the token ids of a reply and those behind it, so that its end is there once; return also how many it keeps.

    A reply ends with one of `stop_ids`, unless it was cut. The template writes an end as well, perhaps another one; it
    is the one that stays.
    """
    kept = stored.tolist()
    if kept and new and kept[-1] in stop_ids and new[0] in stop_ids:
        if kept[-1] == new[0]:
            new = new[1:]
        else:
            kept.pop()
    return [*kept, *new], len(kept)


def tokens_of_text(token_ids: list[int], text: str, decode: Callable[[list[int]], str]) -> list[int] | None:
    """Return the first of these token ids that spell a text; None if a stop string has cut it inside of one.

    Cost: a decoding for each token of the stop string.
    """
    for end in range(len(token_ids), -1, -1):
        spelt = decode(token_ids[:end])
        if len(spelt) <= len(text):
            return token_ids[:end] if spelt == text else None
    return None


def with_placeholders(messages_of: Callable[[Node], Messages], path: list[Node]) -> Messages:
    """Return the messages of a path, with placeholders as the texts of replies whose token ids are known."""
    messages = Messages()
    for node in path:
        if node.own_tokens is not None and node.role == "assistant":
            messages.append({"role": "assistant", "content": uuid4().hex})
        else:
            messages += messages_of(node)
    return messages
