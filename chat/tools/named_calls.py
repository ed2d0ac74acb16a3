"""Reads and constrains calls that are written as a name and an object of JSON with the arguments, each between marks.

Mistral writes [TOOL_CALLS]name[ARGS]{...}, Kimi-K2 <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}
<|tool_call_end|>, and DeepSeek the same with other marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybridmem.chat.tools.calls import ID, Block, CallPart, Literals, Tool
from hybridmem.chat.tools.example import ARGUMENTS, NAME, Example, spread_index
from hybridmem.chat.tools.frames import FramedCalls, flexible
from hybridmem.chat.tools.json_calls import Nesting
from hybridmem.chat.tools.tool_schemas import arguments_rule

_SURE_LENGTH = 256
"""Behind a mark, so many characters are looked at to see that no call follows."""
_WORD = r"[^\s<>\[\]{}\"']+?"


@dataclass(frozen=True)
class NamedCalls(FramedCalls):
    """Defines the texts around the parts of a call.

    Attributes:
        frame: the texts around a call, up to the function's name.
        name_end: the text between the name and the arguments.
    """

    name_end: str

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.frame.texts, self.name_end)

    def open(self, tools: Sequence[Tool]) -> Block:
        return NamedBlock(self)

    def rules_of(self, tools: Mapping[str, Tool], literals: Literals) -> list[str]:
        end = literals(self.name_end)
        return [f"{name}: {json.dumps(tool.name)} {end} {arguments_rule(tool)}" for name, tool in tools.items()]

    @cached_property
    def head(self) -> re.Pattern[str]:
        """Return the pattern of the text before the arguments.

        The call's id is optional in it, because some models leave it out.
        """
        name_end = flexible(self.name_end.strip())
        if ID in self.name_end:
            before, _, after = self.name_end.strip().partition(ID)
            name_end = rf"(?:{flexible(before)}(?P<id>[A-Za-z0-9_-]*))?{flexible(after)}"
        opening = flexible(self.inner_opening.strip())
        if ID in self.inner_opening:
            before, _, after = self.inner_opening.strip().partition(ID)
            opening = rf"{flexible(before)}(?P<id>[A-Za-z0-9_-]*){flexible(after)}"
        return re.compile(rf"\s*{opening}\s*(?P<name>{_WORD})\s*{name_end}\s*(?=\{{)")

    @cached_property
    def inner_opening(self) -> str:
        """Return the text between the mark, or an earlier call, and the function's name."""
        return (
            self.frame.opening if self.frame.begin.strip() else self.frame.opening.strip().removeprefix(self.frame.mark)
        )


def infer_named_calls(example: Example) -> NamedCalls | None:
    """Return the format of the calls in an example. None: they are not a name and an object."""
    arguments = re.escape(json.dumps(ARGUMENTS))
    calls = list(re.finditer(rf"{NAME}((?:(?!{NAME}).)*?){arguments}", example.text, re.DOTALL))
    if len(calls) != example.n_calls or any(sign in calls[0][1] for sign in '{"'):
        return None
    frame = example.frame([call.span() for call in calls])
    return NamedCalls(frame, spread_index([call[1] for call in calls])) if frame.mark else None


class NamedBlock:
    """Reads calls one after the other, and returns the arguments of each while they are written."""

    def __init__(self, calls: NamedCalls) -> None:
        self._calls, self._frame = calls, calls.frame
        self._text = ""  # This text has not been read yet.
        self._index = 0
        self._nesting: Nesting | None = None  # This finds the end of the arguments that are being read.
        self._is_behind = False  # The text stands after the arguments of a call.
        self.rest: str | None = None
        self.is_text = False

    def feed(self, text: str) -> list[CallPart]:
        self._text += text
        parts = list[CallPart]()
        while self.rest is None and not self.is_text:
            n_before = len(self._text)
            if self._nesting is not None:
                parts += self._read_arguments(self._nesting)
            elif self._is_behind:
                self._pass_end()
            else:
                parts += self._read_head()
            if len(self._text) == n_before:
                break
        return parts

    def close(self) -> list[CallPart] | None:
        self.rest = self.rest or ""
        return [] if self._index else None

    def _read_head(self) -> list[CallPart]:
        head = self._calls.head.match(self._text)
        if head is None:
            if not self._index:
                self.is_text = self._cannot_begin()
            elif (stop := self._frame.stop) and stop in self._text:
                self.rest = self._text.partition(stop)[2]
            return []
        self._text, self._nesting = self._text[head.end() :], Nesting()
        groups = head.groupdict()
        self._index += 1
        return [CallPart(self._index - 1, groups["name"], id=groups.get("id") or "")]

    def _cannot_begin(self) -> bool:
        begun, wanted = "".join(self._text.split()), "".join(self._calls.inner_opening.partition(ID)[0].split())
        if not (begun.startswith(wanted) or wanted.startswith(begun)):
            return True
        stops = [stop for stop in (self._frame.stop, self._frame.closing.strip()) if stop]
        return len(self._text) > _SURE_LENGTH or any(stop in self._text for stop in stops)

    def _read_arguments(self, nesting: Nesting) -> list[CallPart]:
        n = nesting.count_inside(self._text)
        written, self._text = self._text[:n], self._text[n:]
        if nesting.is_closed:
            self._nesting, self._is_behind = None, True
        return [CallPart(self._index - 1, arguments=written)] if written else []

    def _pass_end(self) -> None:
        """Read what stands after the arguments."""
        text, closing = self._text.lstrip(), self._frame.closing.strip()
        if closing and text.startswith(closing):
            self._text = text = text[len(closing) :]
        elif closing and closing.startswith(text):
            return
        if not self._frame.begin.strip():
            self.rest = self._text
            return
        self._is_behind = False
        stop = self._frame.stop
        if text.lstrip().startswith(stop) and stop:
            self.rest = text.lstrip()[len(stop) :]
