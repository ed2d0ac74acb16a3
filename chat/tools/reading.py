"""Splits the text of a reply into thoughts, content and calls of tools, while it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from hybridmem.chat.tools.calls import Block, CallFormat, CallPart, Tool, n_begun
from hybridmem.chat.tools.calls import Part as Part
from hybridmem.chat.tools.families import Habits
from hybridmem.chat.tools.harmony import HarmonyReader


class ReplyReader:
    """Reads one reply. Text that may be the beginning of a mark is held back until that is clear.

    A call inside of thoughts counts as a call if the thoughts do not end and only calls follow it. Until that is clear,
    it is held back.

    Args:
        calls: how calls are written. None: there are no calls.
        is_thinking: whether the prompt ended with the mark that begins thoughts.
    Attributes:
        begun_at: the number of characters before the newest block, or before the calls in thoughts that are held back.
    """

    def __init__(
        self, habits: Habits, tools: Sequence[Tool] = (), calls: CallFormat | None = None, *, is_thinking: bool = False
    ) -> None:
        self._habits = habits
        self._thoughts = habits.thoughts
        self._tools = tools
        self._calls = calls
        self._is_thinking = is_thinking
        self._may_think = habits.thinks and not is_thinking  # There are thoughts only at the beginning of a reply.
        self._may_be_bare = calls is not None and calls.is_bare
        self._block: Block | None = None
        self._raw = ""  # This is the text of the current block so far, with its mark.
        # These are calls inside of thoughts. It is not clear yet whether they count as calls.
        self._pending: list[Part] | None = None
        self._pending_raw = ""
        # These count the calls in the whole reply, and the calls before the current block.
        self._n_calls = self._n_before = 0
        self._held = ""
        self._n_fed = self.begun_at = 0
        self._is_after_mark = is_thinking

    @property
    def has_calls(self) -> bool:
        return self._n_calls > 0

    @property
    def is_in_call(self) -> bool:
        """Return whether calls have begun and more may follow."""
        return self._block is not None or self._pending is not None

    @property
    def is_quiet(self) -> bool:
        """Return whether no text is held back."""
        return not (self.is_in_call or self._held or (self._may_think and self._n_fed))

    def feed(self, text: str) -> list[Part]:
        """Return the parts that the new text completes."""
        self._held += text
        self._n_fed += len(text)
        return self._read(is_end=False)

    def close(self) -> list[Part]:
        """Return what was held back. No text follows."""
        parts = self._read(is_end=True)
        while self._block is not None:
            parts += self._close_block()
            parts += self._read(is_end=True)
        if self._pending is not None:  # The thoughts did not end, and only calls followed.
            parts, self._pending = [*parts, *self._numbered(self._pending)], None
        return parts

    def count_thoughts(self, bytes_of: Callable[[int], bytes], token_ids: Sequence[int]) -> int:
        """Count the tokens of a reply up to the end of its thoughts, including marks. The reader must be new.

        Args:
            bytes_of: returns the bytes for which a token stands.
        """
        begin, end, text = self._thoughts.begin.encode(), self._thoughts.end.encode(), b""
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
            if self._may_be_bare and not self._is_thinking and not self._begin_bare(is_end=is_end):
                return parts
            if self._block is not None:
                text, self._held = self._held, ""
                parts += self._feed_block(text)
                if self._block is not None:
                    return parts
                continue
            mark, at = self._next_mark()
            if not mark:
                n = len(self._held) if is_end else len(self._held) - self._n_suspect()
                parts += self._take(self._held[:n])
                self._held = self._held[n:]
                return parts
            parts += self._take(self._held[:at])
            self._held = self._held[at + len(mark) :]
            parts += self._pass_mark(mark)

    def _begin_thoughts(self, *, is_end: bool) -> bool:
        """Look for the mark at the beginning. Return False if more text is needed to decide."""
        text, begin = self._held.lstrip(), self._thoughts.begin
        if text.startswith(begin):
            self._held, self._is_thinking, self._is_after_mark = text[len(begin) :], True, True
        elif not is_end and begin.startswith(text):
            return False
        self._may_think = False
        return True

    def _begin_bare(self, *, is_end: bool) -> bool:
        """Let a block read the beginning of the reply, which may be a call. Return False if there is no text yet."""
        text = self._held.lstrip()
        if not text and not is_end:
            return False
        self._may_be_bare = False
        assert self._calls is not None, "it has no marks"
        if text and not any(text.startswith(mark) or mark.startswith(text) for mark in self._calls.marks):
            self._open_block("")
        return True

    def _searched(self) -> tuple[str, ...]:
        """Return the marks that may come at this point of the reply."""
        ends = (self._thoughts.end,) if self._is_thinking else ()
        return (*ends, *(self._calls.marks if self._calls is not None else ()))

    def _next_mark(self) -> tuple[str, int]:
        """Return the first mark in the held text, and its position.

        Of several marks at one position, the longest counts.
        """
        found = [(at, -len(mark), mark) for mark in self._searched() if (at := self._held.find(mark)) >= 0]
        if not found:
            return "", -1
        at, _, mark = min(found)
        return mark, at

    def _n_suspect(self) -> int:
        """Count the characters at the end of the held text that may be the beginning of a mark."""
        return max((n_begun(self._held, mark) for mark in self._searched()), default=0)

    def _pass_mark(self, mark: str) -> list[Part]:
        if self._is_thinking and mark == self._thoughts.end:
            parts = self._as_thoughts()
            self._is_thinking, self._is_after_mark = False, True
            return parts
        self._open_block(mark)
        return []

    def _open_block(self, mark: str) -> None:
        assert self._calls is not None, "its mark was found"
        n_pending = len({part.call.index for part in self._pending or () if part.call is not None})
        if self._pending is None:
            self.begun_at = self._n_fed - len(self._held) - len(mark)
        self._block, self._n_before, self._raw = self._calls.open(self._tools), self._n_calls + n_pending, mark
        if mark and mark != self._calls.marks[0]:
            self._raw, self._held = "", mark + self._held

    def _feed_block(self, text: str) -> list[Part]:
        assert self._block is not None, "the caller has looked"
        self._raw += text
        parts = self._told(self._block.feed(text))
        if self._block.is_text:
            return [*parts, *self._give_back()]
        if self._block.rest is not None:
            self._end_block(self._block.rest)
        elif self._is_thinking and self._thoughts.end in self._raw:
            # The block was a part of the thoughts, which end here.
            parts += self._as_thoughts()
            thoughts, _, rest = self._raw.partition(self._thoughts.end)
            self._held, self._block, self._raw = self._thoughts.end + rest, None, ""
            parts += [Part(reasoning=thoughts)] if thoughts else []
        return parts

    def _end_block(self, rest: str) -> None:
        if self._pending is not None:
            self._pending_raw += self._raw.removesuffix(rest)
        self._held, self._block, self._raw, self._is_after_mark = rest + self._held, None, "", True

    def _close_block(self) -> list[Part]:
        assert self._block is not None, "the caller has looked"
        rest = self._block.close()
        if rest is None:
            return self._give_back()
        parts = self._told(rest)
        self._end_block(self._block.rest or "")
        return parts

    def _give_back(self) -> list[Part]:
        """Turn a block without calls into text, which may contain other marks."""
        assert self._calls is not None, "it has a block"
        mark = next((mark for mark in self._calls.marks if self._raw.startswith(mark)), "")
        raw, self._block, self._raw = self._raw, None, ""
        parts = self._take(mark or raw[:1])
        self._held = raw[len(mark) or 1 :] + self._held
        return parts

    def _told(self, parts: list[CallPart]) -> list[Part]:
        numbered = [Part(call=replace(part, index=self._n_before + part.index)) for part in parts]
        if self._is_thinking:
            self._pending = [*(self._pending or ()), *numbered]
            return []
        return self._numbered(numbered)

    def _numbered(self, parts: list[Part]) -> list[Part]:
        """Number the calls in these parts, counted in the whole reply."""
        for part in parts:
            if part.call is not None:
                self._n_calls = max(self._n_calls, part.call.index + 1)
        return parts

    def _as_thoughts(self) -> list[Part]:
        """Return the text of calls that turned out to be part of thoughts."""
        raw, self._pending, self._pending_raw = self._pending_raw, None, ""
        return [Part(reasoning=raw)] if raw else []

    def _take(self, text: str) -> list[Part]:
        parts = list[Part]()
        if self._pending is not None:
            if not text.strip():
                self._pending_raw += text
                return []
            parts = self._as_thoughts()
            self._is_after_mark = False
        if self._is_after_mark:  # Models put white space between marks and text.
            text = text.lstrip("\n") if self._is_thinking else text.lstrip()
            self._is_after_mark = not text
        if not text:
            return parts
        return [*parts, Part(reasoning=text) if self._is_thinking else Part(content=text)]


class Reader(Protocol):
    """Declares the interface that readers of replies have in common."""

    begun_at: int

    @property
    def has_calls(self) -> bool: ...
    @property
    def is_in_call(self) -> bool: ...
    @property
    def is_quiet(self) -> bool: ...
    def feed(self, text: str) -> list[Part]: ...
    def close(self) -> list[Part]: ...
    def count_thoughts(self, bytes_of: Callable[[int], bytes], token_ids: Sequence[int]) -> int: ...


def make_reader(
    habits: Habits, tools: Sequence[Tool] = (), calls: CallFormat | None = None, *, is_thinking: bool = False
) -> Reader:
    """Return the reader of a new reply. The arguments are those of `ReplyReader`."""
    if habits.has_channels:
        return HarmonyReader(tools, has_calls=calls is not None)
    return ReplyReader(habits, tools, calls, is_thinking=is_thinking)
