"""Finds out how a chat template writes calls and thoughts: it renders a chat whose every word is known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hybridmem.chat.special_tokens import apply_template
from hybridmem.chat.tools.calls import ID
from hybridmem.chat.tools.example import (
    ARGUMENTS,
    IDS,
    LIST_KEY,
    NAME,
    NUMBER_KEY,
    TEXT_KEY,
    Example,
    count_common,
    to_first_mark,
)
from hybridmem.chat.tools.frames import pieces

_ASKED, _SAID, _THOUGHT = "uq7xu", "cq7xc", "tq7xt"
_TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Fetches.",
        "parameters": {
            "type": "object",
            "properties": {
                TEXT_KEY: {"type": "string", "description": "A text."},
                NUMBER_KEY: {"type": "integer", "description": "A number."},
                LIST_KEY: {"type": "array", "items": {"type": "string"}, "description": "A list."},
            },
            "required": [TEXT_KEY],
        },
    },
}


class Probe:
    """Renders chats by one tokenizer's template. A template is a program of the checkpoint, and may refuse any of them.

    Attributes:
        header: what stands between a user's message and a reply to it that another message follows.
        turn_end: what stands after a reply at the end of a chat.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._asked = {"role": "user", "content": _ASKED}
        said = {"role": "assistant", "content": _SAID}
        followed = self._render([self._asked, said, {"role": "user", "content": "vq7xv"}])
        last = self._render([self._asked, said])
        self.header, self._last_header = _between(followed, _ASKED, _SAID), _between(last, _ASKED, _SAID)
        self.turn_end = last.rpartition(_SAID)[2]
        opened = self._render([self._asked], add_generation_prompt=True)
        self._opened = opened.rpartition(_ASKED)[2]

    def written_calls(self) -> Example | None:
        """Return the text that the template writes for two calls, or for one. None: it writes no calls."""
        for n in (2, 1):
            text = self._render([self._asked, self._calling(n)])
            reply = text.rpartition(_ASKED)[2] if _ASKED in text else ""
            if reply.count(NAME) < n:
                continue
            at = max(_n_common(reply, header) for header in (self.header, self._last_header))
            behind = _n_common_end(reply[at:], self.turn_end)
            reply = reply[at : len(reply) - behind]
            for call_id in IDS:
                reply = reply.replace(call_id, ID)
            return Example(reply, n)
        return None

    def written_thoughts(self) -> tuple[str, str] | None:
        """Return the texts that the template writes around the thoughts of a reply. None: it writes no thoughts."""
        thoughts = {"reasoning_content": _THOUGHT, "reasoning": _THOUGHT, "thinking": _THOUGHT}
        plain, called = {"role": "assistant", "content": _SAID}, self._calling(1)
        calls = self._render([self._asked, called]).rpartition(_ASKED)[2].partition(NAME)[0]
        for message, stop, behind in ((plain, _SAID, self.header), (called, NAME, calls)):
            text = self._render([self._asked, message | thoughts])
            begin, found, rest = text.rpartition(_ASKED)[2].partition(_THOUGHT)
            end = rest.partition(stop)[0]
            if not found or not end.strip():
                continue
            own_begin = begin[_n_common(begin, self.header) :].strip()
            # The opening of a reply may itself begin the thoughts.
            own_begin = own_begin or self._opened[_n_common(self._opened, self.header) :].strip()
            own_begin = own_begin or (pieces(begin.strip()) or [""])[-1]
            own_end = end[: len(end) - _n_common_end(end, behind)].strip() or end.strip()
            first = to_first_mark(own_end)
            if _core(first) == _core(own_begin) and _core(first):  # The text after the mark belongs to the content.
                own_end = first
            if own_begin:
                return own_begin, own_end
        return None

    def shows_tools(self) -> bool:
        """Return whether the template tells the model which tools there are."""
        return NAME in self._render([self._asked])

    def _calling(self, n: int, ids: tuple[str, ...] = IDS) -> dict[str, Any]:
        calls = [
            {"id": ids[i], "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}} for i in range(n)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def _called(self, ids: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        yield self._calling(1, ids)
        yield {"role": "tool", "name": NAME, "tool_call_id": ids[0], "content": "rq7xr"}

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        for more in ({"tools": [_TOOL]}, {}):
            with suppress(Exception):
                return apply_template(self._tokenizer, messages, **more, **options)
        return ""


def _between(text: str, begin: str, end: str) -> str:
    return text.rpartition(begin)[2].partition(end)[0] if end in text else ""


def _n_common(text: str, other: str) -> int:
    """Count the leading characters that two texts have in common, in whole pieces."""
    return count_common(pieces(text), pieces(other))


def _n_common_end(text: str, other: str) -> int:
    """Count the last characters that two texts have in common, in whole pieces."""
    return count_common(pieces(text)[::-1], pieces(other)[::-1])


def _core(mark: str) -> str:
    """Return the letters of a mark, without those that say whether the mark begins or ends something."""
    letters = re.sub("[^a-z]", "", mark.lower())
    return re.sub("^(start|begin|open|end|close)", "", letters)
