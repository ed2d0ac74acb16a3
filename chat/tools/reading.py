"""Splits the text of a reply into thoughts, content and calls of tools, while it comes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridmem.chat.tools.calls import Block, CallFormat, CallPart, Tool
from hybridmem.chat.tools.families import THINK_BEGIN, THINK_END, Habits


@dataclass(frozen=True)
class Part:
    """Holds a piece of a reply, as one of thoughts, content or a call."""

    content: str = ""
    reasoning: str = ""
    call: CallPart | None = None


class ReplyReader:
    """Reads one reply. Text that may be the beginning of a mark is held back until that is clear.

    Args:
        calls: how calls are written. None: there are no calls.
        is_thinking: whether the prompt ended with the mark that begins thoughts.
    """

    def __init__(
        self, habits: Habits, tools: Sequence[Tool] = (), calls: CallFormat | None = None, *, is_thinking: bool = False
    ) -> None:
        self._habits = habits
        self._tools = tools
        self._calls = calls
        self._is_thinking = is_thinking
        self._may_think = habits.thinks and not is_thinking  # Thoughts stand only at the beginning.
        self._block: Block | None = calls.open(tools) if calls is not None and not calls.begin else None
        self._raw = ""  # The text of the current block so far.
        self._n_calls = self._n_before = 0  # These count calls in the whole reply, and before the block.
        self._held = ""
        self._is_after_mark = is_thinking
        names = sorted(habits.special - self._marks(), key=len, reverse=True) if habits.shows_special else []
        self._others = re.compile("|".join(map(re.escape, names))) if names else None

    @property
    def has_calls(self) -> bool:
        return self._n_calls > 0

    def _marks(self) -> set[str]:
        marks = {THINK_BEGIN, THINK_END} if self._habits.thinks else set()
        return marks | ({self._calls.begin, self._calls.end} if self._calls is not None else set())

    def feed(self, text: str) -> list[Part]:
        """Return the parts that the new text completes."""
        self._held += text
        return self._read(is_end=False)

    def close(self) -> list[Part]:
        """Return what was held back. No text follows."""
        parts = self._read(is_end=True)
        if self._block is not None:
            parts += self._close_block()
        return parts

    def count_thoughts(self, bytes_of: Callable[[int], bytes], token_ids: Sequence[int]) -> int:
        """Count the tokens of a reply up to the end of its thoughts, including marks. The reader must be new.

        Args:
            bytes_of: returns the bytes for which a token stands.
        """
        begin, end, text = THINK_BEGIN.encode(), THINK_END.encode(), b""
        is_thinking, may_think = self._is_thinking, self._may_think
        for n, piece in enumerate(map(bytes_of, token_ids), 1):
            text += piece
            if may_think and not begin.startswith(text.lstrip()):
                is_thinking, may_think = text.lstrip().startswith(begin), False
            if not (is_thinking or may_think):
                return 0
            if is_thinking and end in text[-len(piece) - len(end) :]:
                return n
        return len(token_ids) if is_thinking else 0

    def _read(self, *, is_end: bool) -> list[Part]:
        parts = list[Part]()
        while True:
            if self._may_think and not self._begin_thoughts(is_end=is_end):
                return parts
            mark = self._next_mark()
            at = self._held.find(mark) if mark else -1
            if at < 0:
                n = len(self._held) if is_end or not mark else len(self._held) - _n_suspect(self._held, mark)
                parts += self._take(self._held[:n])
                self._held = self._held[n:]
                return parts
            parts += self._take(self._held[:at])
            self._held = self._held[at + len(mark) :]
            parts += self._pass_mark()

    def _begin_thoughts(self, *, is_end: bool) -> bool:
        """Look for the mark at the beginning. Return False if more text is needed to decide."""
        text = self._held.lstrip()
        if text.startswith(THINK_BEGIN):
            self._held, self._is_thinking, self._is_after_mark = text[len(THINK_BEGIN) :], True, True
        elif not is_end and THINK_BEGIN.startswith(text):
            return False
        self._may_think = False
        return True

    def _next_mark(self) -> str:
        if self._is_thinking:
            return THINK_END
        if self._calls is None:
            return ""
        return self._calls.begin if self._block is None else self._calls.end

    def _pass_mark(self) -> list[Part]:
        self._is_after_mark = True
        if self._is_thinking:
            self._is_thinking = False
            return []
        if self._block is not None:
            return self._close_block()
        assert self._calls is not None, "its mark was found"
        self._block, self._n_before = self._calls.open(self._tools), self._n_calls
        return []

    def _take(self, text: str) -> list[Part]:
        if self._is_thinking or self._block is None:
            text = self._others.sub("", text) if self._others is not None else text
            if self._is_after_mark:  # Models put white space between marks and text.
                text = text.lstrip("\n") if self._is_thinking else text.lstrip()
                self._is_after_mark = not text
        if not text:
            return []
        if self._is_thinking:
            return [Part(reasoning=text)]
        if self._block is None:
            return [Part(content=text)]
        self._raw += text
        return self._told(self._block.feed(text))

    def _told(self, parts: list[CallPart]) -> list[Part]:
        for part in parts:
            self._n_calls = max(self._n_calls, self._n_before + part.index + 1)
        return [Part(call=CallPart(self._n_before + part.index, part.name, part.arguments)) for part in parts]

    def _close_block(self) -> list[Part]:
        assert self._block is not None and self._calls is not None
        rest, raw, self._block, self._raw = self._block.close(), self._raw, None, ""
        if rest is None:  # The model wrote something else between the marks.
            return [Part(content=f"{self._calls.begin}{raw}{self._calls.end}")] if raw else []
        return self._told(rest)


def _n_suspect(text: str, mark: str) -> int:
    """Count the characters at the end that may be the beginning of a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
