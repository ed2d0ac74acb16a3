"""Reads and constrains replies in the format of gpt-oss, which consist of messages in channels:

<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{}

The channel "analysis" holds thoughts, and "final" the content. A message to a function is a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridmem.chat.tools.calls import Block, CallPart, Literals, Part, Tool, n_begun
from hybridmem.chat.tools.json_calls import Nesting
from hybridmem.chat.tools.named_calls import NamedBlock, NamedCalls
from hybridmem.chat.tools.tool_schemas import arguments_rule

MESSAGE, CHANNEL, START, END = "<|message|>", "<|channel|>", "<|start|>", "<|end|>"
THOUGHTS_BEGIN = f"{CHANNEL}analysis{MESSAGE}"
_ENDS = (END, "<|call|>", "<|return|>", START)
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT_MARK = "to="
_RECIPIENT = re.compile(rf"\b{_RECIPIENT_MARK}([^\s<]+)")
_FUNCTIONS = "functions."


@dataclass(frozen=True)
class HarmonyCalls:
    """Defines the format of calls.

    Attributes:
        named: the texts around a call, as the template writes them.
    """

    named: NamedCalls

    @property
    def begun_by(self) -> str:
        return f"to={_FUNCTIONS}"

    @property
    def has_blocks(self) -> bool:
        return False

    @property
    def is_bare(self) -> bool:
        return False

    @property
    def marks(self) -> tuple[str, ...]:
        return ()

    @property
    def literals(self) -> tuple[str, ...]:
        return (MESSAGE, CHANNEL, START, END, "<|constrain|>")

    def open(self, tools: Sequence[Tool]) -> Block:
        return NamedBlock(self.named)

    def rules(self, tools: Sequence[Tool], literals: Literals, *, is_parallel: bool) -> str:
        """Return the rules of one call. The token that ends it ends the reply, so it is no part of the grammar."""
        # The channel may stand before or after the function, and a word about the arguments' form after it.
        channel, form = f"{literals(CHANNEL)} /[a-z]+/", f"{literals('<|constrain|>')} /[ a-z]+/"
        name_end = f"/( [ a-z]*)?/ ({channel} /( [ a-z]*)?/)? ({form})? {literals(MESSAGE)}"
        opening, usual_end = literals(self.named.frame.opening), literals(self.named.name_end)
        usual = [f"({json.dumps(tool.name)} {usual_end} {arguments_rule(tool)})" for tool in tools]
        begun = [f"({json.dumps(tool.name)} {name_end} {arguments_rule(tool)})" for tool in tools]
        return f"calls: {opening} ({' | '.join(usual)}) | {json.dumps(self.begun_by)} ({' | '.join(begun)})"


def thoughts_rule(literals: Literals) -> str:
    """Return the rules of a message with thoughts, up to where the next message begins."""
    text, how = literals.until(END)
    return f"thought: {literals(THOUGHTS_BEGIN)} thoughts {literals(START + 'assistant')}\nthoughts{how}: {text}"


def content_opening(literals: Literals) -> str:
    """Return the text before the content of a reply, as terms in Lark."""
    return literals(f"{CHANNEL}final{MESSAGE}")


class HarmonyReader:
    """Reads one reply, as `ReplyReader` does. The prompt has ended with "<|start|>assistant".

    Attributes:
        begun_at: the number of characters before the recipient of the newest call.
    """

    def __init__(self, tools: Sequence[Tool] = (), *, has_calls: bool = False) -> None:
        self._tools, self._takes_calls = frozenset(tool.name for tool in tools), has_calls
        self._held = ""
        # This is the kind of the current message: "thoughts", "content" or "call". None: its header is being read.
        self._kind: str | None = None
        self._nesting = Nesting()
        self._n_calls = self._n_fed = self.begun_at = 0

    @property
    def has_calls(self) -> bool:
        return self._n_calls > 0

    @property
    def is_in_call(self) -> bool:
        """Return whether the arguments of a call have begun and are not complete."""
        return self._kind == "call" and not self._nesting.is_closed

    @property
    def is_quiet(self) -> bool:
        """Return whether no text is held back, except for a header that names no recipient yet."""
        if self._kind is None:
            return _RECIPIENT_MARK not in self._held and not n_begun(self._held, _RECIPIENT_MARK)
        return not (self.is_in_call or self._held)

    def feed(self, text: str) -> list[Part]:
        self._held += text
        self._n_fed += len(text)
        return self._read(is_end=False)

    def close(self) -> list[Part]:
        parts = self._read(is_end=True)
        if self.is_in_call:
            self._kind = None
        if self._kind is None and self._held.strip() and not _is_header(self._held):
            parts.append(Part(content=self._held))  # The model has written no channels.
            self._held = ""
        return parts

    def count_thoughts(self, bytes_of: Callable[[int], bytes], token_ids: Sequence[int]) -> int:
        begin, end, text = THOUGHTS_BEGIN.encode(), END.encode(), b""
        for n, piece in enumerate(map(bytes_of, token_ids), 1):
            text += piece
            if not (begin.startswith(text) or text.startswith(begin)):
                return 0
            if end in text:
                return n
        return len(token_ids) if text.startswith(begin) else 0

    def _read(self, *, is_end: bool) -> list[Part]:
        parts = list[Part]()
        while True:
            n_before = len(self._held)
            parts += self._read_header() if self._kind is None else self._read_body(self._kind, is_end=is_end)
            if len(self._held) == n_before:
                return parts

    def _read_header(self) -> list[Part]:
        header, found, rest = self._held.partition(MESSAGE)
        if not found:
            return []
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        n_before, self._held = self._n_fed - len(self._held), rest
        if recipient is not None and recipient[1].startswith(_FUNCTIONS) and self._takes_calls:
            self.begun_at = n_before + recipient.start()
            self._kind, self._nesting = "call", Nesting()
            self._n_calls += 1
            return [Part(call=CallPart(self._n_calls - 1, recipient[1].removeprefix(_FUNCTIONS)))]
        self._kind = "thoughts" if channel is not None and channel[1] == "analysis" else "content"
        return []

    def _read_body(self, kind: str, *, is_end: bool) -> list[Part]:
        if kind == "call" and not self._nesting.is_closed:  # Marks inside strings of the arguments are text.
            n = self._nesting.count_inside(self._held)
            written, self._held = self._held[:n], self._held[n:]
            return [Part(call=CallPart(self._n_calls - 1, arguments=written))] if written else []
        found = [(at, -len(mark), mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
        if found:
            at, _, mark = min(found)
            text, self._held, self._kind = self._held[:at], self._held[at + len(mark) :], None
        else:
            n = len(self._held) if is_end else len(self._held) - max(n_begun(self._held, mark) for mark in _ENDS)
            text, self._held = self._held[:n], self._held[n:]
        if not text or kind == "call":
            return []
        return [Part(reasoning=text) if kind == "thoughts" else Part(content=text)]


def _is_header(text: str) -> bool:
    return CHANNEL in text or START in text or text.strip() == "assistant" or "to=" in text
