"""Renders chat templates, and finds out which tokens they write around messages.

Templates agree on little more than roles and contents. In this library, all callers pass messages in one form: contents
are texts (their parts joined, null as ""), and the arguments of calls are objects. A template that wants another form
gets it: contents as lists of parts, arguments as text, ids of nine letters and digits, or an empty list of tools. A
template is a program of the checkpoint, and may raise anything.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import product, takewhile
from typing import Any
from weakref import WeakKeyDictionary

from jinja2.exceptions import SecurityError

from hybridmem.chat.special_tokens.lists import render_with_lists

Message = dict[str, Any]
Form = Callable[[Message], Message]
_ROLES = "user", "assistant", "system", "tool", "developer"
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


def apply_template(tokenizer: Any, messages: list[Message], **options: Any) -> str:
    """Return messages as text, in the form that the tokenizer's template wants. Raises whatever the template raises."""
    first = _form_of(tokenizer)
    try:
        return _render(tokenizer, [first(message) for message in messages], options)
    except Exception:
        # Templates that are made only for tools read `tools` without checking whether there are any.
        if not options.get("tools"):
            with suppress(Exception):
                return _render(tokenizer, [first(message) for message in messages], {**options, "tools": []})
        if any("tool_calls" in message or "tool_call_id" in message for message in messages):
            for form in _FORMS:
                with suppress(Exception):
                    return _render(tokenizer, [form(message) for message in messages], options)
        raise


def _render(tokenizer: Any, messages: list[Message], options: dict[str, Any]) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except SecurityError as error:
        if "'list'" not in str(error):
            raise
        return render_with_lists(tokenizer, messages, options)


# The functions below write messages in the forms that some templates want.


def _as_they_are(message: Message) -> Message:
    return message


def _with_short_ids(message: Message) -> Message:
    """Return a message whose calls have ids of nine letters and digits. Equal ids become equal ids."""
    told = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        told["tool_call_id"] = _short(message["tool_call_id"])
    if isinstance(calls := message.get("tool_calls"), list):
        told["tool_calls"] = [{**call, "id": _short(str(call.get("id")))} for call in calls]
    return told


def _short(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _with_text_arguments(message: Message) -> Message:
    """Return a message whose calls have their arguments as text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_text(call) for call in calls]} if isinstance(calls, list) else message


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _with_both(message: Message) -> Message:
    return _with_text_arguments(_with_short_ids(message))


def _with_parts(message: Message) -> Message:
    """Return a message whose content is a list of parts."""
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


_FORMS: tuple[Form, ...] = (_with_short_ids, _with_text_arguments, _with_both)
_forms: WeakKeyDictionary[Any, tuple[str, Form]] = WeakKeyDictionary()


def _form_of(tokenizer: Any) -> Form:
    """Return the form that a template wants. The form is determined once for each tokenizer and template."""
    template = template_text(tokenizer)
    try:
        known = _forms.get(tokenizer)
    except TypeError:  # Some objects that stand in for tokenizers cannot be keys of a weak table.
        return _as_they_are
    if known is None or known[0] != template:
        known = _forms[tokenizer] = template, _find_form(tokenizer)
    return known[1]


def _find_form(tokenizer: Any) -> Form:
    word, arguments = "x7e2x", {"x7e3x": "x7e4x"}
    asked: Message = {"role": "user", "content": word}
    function = {"name": "x7e5x", "arguments": arguments}
    called: Message = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": function}]}
    with suppress(Exception):
        if word not in _render(tokenizer, [asked], {}) and word in _render(tokenizer, [_with_parts(asked)], {}):
            return _with_parts
    with suppress(Exception):
        # The template has written Python's form of the arguments, which is not JSON.
        if str(arguments) in _render(tokenizer, [asked, called], {}):
            return _with_text_arguments
    return _as_they_are


# The functions below read a template: its source, and the tokens that it writes.


def template_text(tokenizer: Any) -> str:
    """Return the source of the chat template, or of all of them if the tokenizer has several with names."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


def find_turn_end(tokenizer: Any) -> int | None:
    """Return the token that the chat template writes right after a reply; None if that is no added token.

    A token that also stands after thoughts does not end a reply.
    """
    reply, thought = "x7e2", "x7e6"
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": reply}
    thinking = {**said, "reasoning_content": thought, "thinking": thought}
    with suppress(Exception):
        rendered = apply_template(tokenizer, [asked, said, {"role": "user", "content": "b"}])
        first = _first_token(tokenizer, rendered, reply)
        with suppress(Exception):
            thought_through = apply_template(tokenizer, [asked, thinking])
            if thought in thought_through and _first_token(tokenizer, thought_through, thought) == first:
                first = _first_token(tokenizer, thought_through, reply)
        return first if first in tokenizer.added_tokens_decoder else None
    return None


def find_turn_begin(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that the chat template writes before the words of a user who answers a reply.

    The first of them is an added token, so no written words can begin a turn. The tuple is empty if there is no such
    token.
    """
    reply, words = "x7e2", ("x7e3", "7x", "(e")
    with suppress(Exception):
        begun = list[list[int]]()
        for said in words:
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": reply}]
            rendered = apply_template(tokenizer, [*messages, {"role": "user", "content": said}])
            between = rendered.partition(reply)[2].partition(said)[0]
            begun.append(list(tokenizer.encode(between.lstrip() + said, add_special_tokens=False)))
        # A token that contains a part of the user's words stands in only one of the three renderings.
        common = [ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, zip(*begun, strict=False))]
        added = [i for i, token_id in enumerate(common) if token_id in tokenizer.added_tokens_decoder]
        if added[:2] == [0, 1] or (added[:1] == [0] and common[0] == find_turn_end(tokenizer)):
            added = added[1:]  # The first token ends the reply, so the turn begins later.
        return tuple(common[added[0] :]) if added else ()
    return ()


def _first_token(tokenizer: Any, text: str, behind: str) -> int:
    """Return the token that stands after a word. Raises IndexError if there is none."""
    return int(tokenizer.encode(text.partition(behind)[2].lstrip(), add_special_tokens=False)[0])


def rendered_samples(tokenizer: Any) -> str:
    """Return the text that the chat templates write around sample messages of each role.

    A template may assemble a token's name from parts, such as "<|" + role + "|>". Then its source does not contain the
    name.
    """
    template = getattr(tokenizer, "chat_template", None)
    names = [None] if isinstance(template, str) else [*(template or ())]
    chats: list[list[Message]] = [[{"role": role, "content": "x"}] for role in _ROLES]
    chats += [[*chats[0], *chat] for chat in chats[1:]]
    chats.append([{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")])
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
    called = {"role": "assistant", "content": "", "reasoning_content": "x", "tool_calls": [call]}
    chats.append([*chats[0], called, {"role": "tool", "name": "f", "tool_call_id": call["id"], "content": "x"}])
    schema = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}}
    tool = {"type": "function", "function": {"name": "f", "description": "x", "parameters": schema}}
    texts = list[str]()
    for name, chat, awaits_reply in product(names, chats, (False, True)):
        # A template refuses most of these orders of roles.
        with suppress(Exception):
            options = {"chat_template": name, "add_generation_prompt": awaits_reply}
            texts.append(apply_template(tokenizer, chat, **options | ({"tools": [tool]} if chat is chats[-1] else {})))
    return "\n".join(texts)
