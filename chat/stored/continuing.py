"""Makes the prompt after a stored reply from the reply's token ids, so that nothing before it changes.

A template renders a whole history. The result may differ from what the model has seen: for example, it may lack
thoughts. And if the model's own text is encoded again, it may become other tokens. So the history is not encoded again.
The prompt consists of the stored tokens, and of what the template writes after the last reply. To find that text, the
template renders placeholders instead of the replies whose token ids are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from hybridmem.chat.special_tokens import Rendered
from hybridmem.chat.stored.nodes import Node
from hybridmem.memory import FormatError
from hybridmem.memory.blocks import Int64s

Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], Rendered]
"""Renders messages. If the flag is True, the opening of a reply follows them."""


@dataclass(frozen=True)
class Prompt:
    """Holds the token ids of a prompt, and where they come from.

    Attributes:
        base: the reply whose stored token ids begin the prompt. None: the whole prompt was encoded now.
        n_kept: how many token ids of `base` begin the prompt.
        history: a text that says whether the prompt continues from stored token ids, or why not.
    """

    token_ids: list[int]
    base: str | None
    n_kept: int
    history: str


def rest_behind(render: Render, before: Messages, after: Messages) -> tuple[Rendered, int]:
    """Render a chat with a placeholder for its last stored reply. Also return where that reply ends in the text.

    Args:
        before: the messages before the reply. Stored replies among them are placeholders.
        after: the messages after the reply.
    Raises:
        FormatError: the template now renders the messages before the reply differently. The message says so.
    """
    placeholder = uuid4().hex
    rendered = render([*before, {"role": "assistant", "content": placeholder}, *after], True)
    text = rendered.text
    if text.count(placeholder) != 1:
        raise FormatError("the chat template does not write the earlier reply once, so it is rendered anew")
    start = text.index(placeholder)
    if not text[:start].startswith(render(before, False).text):
        raise FormatError("the chat template renders what is before the earlier reply otherwise now")
    return rendered, start + len(placeholder)


def behind_reply(stored: Int64s, new: list[int], stop_ids: tuple[int, ...]) -> tuple[list[int], int]:
    """Join the token ids of a reply and those after it, so that its end is there once. Also return how many are kept.

    A reply ends with one of `stop_ids`, unless it was cut. The template writes an end as well, perhaps another one. The
    template's end stays.
    """
    kept = stored.tolist()
    if kept and new and kept[-1] in stop_ids and new[0] in stop_ids:
        if kept[-1] == new[0]:
            new = new[1:]
        else:
            kept.pop()
    return [*kept, *new], len(kept)


def tokens_of_text(token_ids: list[int], text: str, decode: Callable[[list[int]], str]) -> list[int] | None:
    """Return the leading token ids that decode to a text. None: a stop string has cut the text inside of a token.

    Cost: one decoding for each token of the stop string.
    """
    for end in range(len(token_ids), -1, -1):
        spelt = decode(token_ids[:end])
        if len(spelt) <= len(text):
            return token_ids[:end] if spelt == text else None
    return None


def with_placeholders(messages_of: Callable[[Node], Messages], path: list[Node]) -> Messages:
    """Return the messages of a path. Replies whose token ids are known have placeholders as texts."""
    messages = Messages()
    for node in path:
        if node.own_tokens is not None and node.role == "assistant":
            messages.append({"role": "assistant", "content": uuid4().hex})
        else:
            messages += messages_of(node)
    return messages
