"""Makes the prompt of a reply in a stored session. It uses stored token ids if the template allows it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hybridmem.chat.prompts import Tokenizer, render_guarded
from hybridmem.chat.server.chat_prompts import encode_messages
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.special_tokens import Rendered
from hybridmem.chat.stored.continuing import Prompt, behind_reply, rest_behind, with_placeholders
from hybridmem.chat.stored.items import as_messages, text_of
from hybridmem.chat.stored.nodes import Node
from hybridmem.memory import FormatError
from hybridmem.memory.blocks import Int64s
from hybridmem.memory.sequences import common_prefix

NO_HISTORY = "there is no earlier reply"


@dataclass(frozen=True)
class History:
    """Holds the history before a reply.

    Attributes:
        path: the nodes from the first message on, including new ones.
        tools: the tools in the form that templates know.
        options: the options of the chat template.
        base: the last reply on the path with known token ids and the same instructions, tools and options.
        tokens: the token ids of `base`.
        why_no_base: if there is no base, the reason in words.
    """

    path: list[Node]
    instructions: str | None
    tools: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    base: Node | None = None
    tokens: Int64s | None = None
    why_no_base: str = NO_HISTORY


def find_base(
    path: list[Node], instructions: str | None, tools: list[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
) -> tuple[Node | None, str]:  # fmt: skip
    """Return the last reply of a path from which a prompt can continue, or the reason why there is none."""
    replies = [node for node in path if node.role == "assistant"]
    if not replies:
        return None, NO_HISTORY
    known = [node for node in replies if node.own_tokens is not None]
    if not known:
        return None, "no token ids are known of what was said before: it was given as text, or changed"
    alike = [node for node in known if node.about.get("instructions") == instructions]
    if not alike:
        return None, "the instructions differ"
    alike = [node for node in alike if node.about.get("told_tools", []) == (tools or [])]
    if not alike:
        return None, "the tools differ"
    alike = [node for node in alike if node.about.get("told_options", {}) == (options or {})]
    return (alike[-1], "") if alike else (None, "the options of the chat template differ")


def make_prompt(texts: Tokenizer, history: History, stop_ids: tuple[int, ...], *, parse_special: bool) -> Prompt:
    """Return the prompt after a history.

    Raises ApiError 400 if the chat template refuses the messages.
    """
    if history.tools or history.options:
        texts = texts.with_options(history.options | ({"tools": history.tools} if history.tools else {}))
    try:
        return _continue(texts, history, stop_ids, parse_special=parse_special)
    except FormatError as error:
        raise ApiError(400, f"{error}.", param="input", code="invalid_value") from None


def count_nodes(texts: Tokenizer, n_prompt: int, n_before: int, nodes: list[Node]) -> list[Node]:
    """Return new nodes with the number of token ids that each adds.

    Each node counts the tokens of its own text; the last one counts all that are left.

    Args:
        n_prompt: the number of token ids of the prompt that ends with these nodes.
        n_before: the number of token ids of the nodes before them.
    """
    first = count_texts(texts, nodes[:-1])
    n_rest = max(0, n_prompt - n_before - sum(node.n_tokens for node in first))
    return [*first, *(replace(node, n_tokens=n_rest) for node in nodes[-1:])]


def count_texts(texts: Tokenizer, nodes: list[Node]) -> list[Node]:
    """Return nodes with an estimate of the token ids that each adds.

    The estimate counts the text without the template.
    """
    return [replace(node, n_tokens=len(texts.encode(text_of(node.items), add_special_tokens=False))) for node in nodes]


def _continue(texts: Tokenizer, history: History, stop_ids: tuple[int, ...], *, parse_special: bool) -> Prompt:
    opening = [{"role": "system", "content": history.instructions}] if history.instructions is not None else []
    why = history.why_no_base
    if history.base is not None and history.tokens is not None:
        at = next(i for i, node in enumerate(history.path) if node.id == history.base.id)
        before = [*opening, *with_placeholders(_messages_of, history.path[:at])]
        after = _messages_of(*history.path[at + 1 :])

        def render(messages: list[dict[str, Any]], awaits_reply: bool) -> Rendered:
            return render_guarded(texts, messages, awaits_reply=awaits_reply, parse_special=parse_special)

        try:
            rendered, start = rest_behind(render, before, after)
            new = rendered.encode(texts, start)
            token_ids, n_kept = behind_reply(history.tokens, new, stop_ids)
            return Prompt(token_ids, history.base.id, n_kept, f"continues from the token ids of {history.base.id}")
        except FormatError as error:
            why = str(error)
    messages = [*opening, *_messages_of(*history.path)]
    token_ids = encode_messages(texts, messages, parse_special=parse_special)
    if history.base is None or history.tokens is None:
        return Prompt(token_ids, None, 0, f"encoded as a whole: {why}")
    n_common = common_prefix(history.tokens, np.array(token_ids, np.int64))
    return Prompt(token_ids, history.base.id, n_common, f"encoded as a whole: {why}")


def _messages_of(*nodes: Node) -> list[dict[str, Any]]:
    return as_messages(item for node in nodes for item in node.items)
