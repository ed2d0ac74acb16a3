"""Constrains a part of a reply: each tool call, from the mark that opens it to its end.

Before the mark the reply is free, and no masks are computed.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from hybridmem.chat.sampling.grammar import Grammar, Matcher
from hybridmem.chat.sampling.token_bytes import TokenBytes


@dataclass(frozen=True)
class Mark:
    """Holds a mark in a reply: the text or token that opens or closes a call or a thought.

    Attributes:
        text: the mark's text.
        pieces: the tokens and the ordinary texts of which the mark consists.
    """

    text: str
    pieces: tuple[int | str, ...]

    @property
    def token_id(self) -> int | None:
        """Return the token that is the whole mark. None: the mark is not a single token."""
        (first, *others) = self.pieces
        return first if isinstance(first, int) and not others else None

    def tokens(self, grammar: Grammar, behind: bytes) -> list[int]:
        """Return the tokens of the mark and of the text after it."""
        texts = [*self.pieces]
        if texts and isinstance(texts[-1], str):
            behind = texts.pop().encode() + behind  # type: ignore[union-attr]
        ids = [i for each in texts for i in ([each] if isinstance(each, int) else grammar.tokenize(each.encode()))]
        return ids + (grammar.tokenize(behind) if behind else [])

    def end_in(self, token_id: int, tail: bytes, n_new: int) -> int | None:
        """Return how many bytes of the newest token stand after the mark. None: the token does not complete it.

        Args:
            tail: the bytes of the reply up to this token, at least as many as those of the mark and of the token.
            n_new: how many bytes the token has.
        """
        if self.token_id is not None:
            return 0 if token_id == self.token_id else None
        wanted = self.text.encode()
        at = tail.find(wanted, max(0, len(tail) - n_new - len(wanted) + 1))
        return len(tail) - at - len(wanted) if at >= 0 else None


@dataclass(frozen=True)
class CallGrammar:
    """Holds the grammar of calls, which applies once a reply has begun one.

    Attributes:
        grammar: begins with the mark.
        begin: the mark. None: no mark tells where a call begins, so only `Trigger.force` begins one.
        thoughts: the marks around thoughts, in which no call begins. None: the model has no thoughts.
        thinks_anywhere: whether thoughts may begin anywhere, and not only at the reply's beginning.
        is_thinking: whether the reply begins inside of thoughts.
        is_single: whether the reply ends after its first call.
    """

    grammar: Grammar
    begin: Mark | None
    tokens: TokenBytes
    thoughts: tuple[Mark, Mark] | None = None
    is_thinking: bool = False
    is_single: bool = False
    thinks_anywhere: bool = False

    def watch(self) -> Trigger:
        """Return a trigger that follows a new reply."""
        return Trigger(self)


class Trigger:
    """Follows one reply up to the beginnings of its calls.

    Attributes:
        has_missed: whether a call has begun in another way than its grammar requires, so that nothing constrains it.
    """

    def __init__(self, calls: CallGrammar) -> None:
        self._calls = calls
        self.has_missed = False
        self._tail = b""
        self._is_thinking = calls.is_thinking
        self._may_think = calls.thoughts is not None and not calls.is_thinking
        marks = [mark for mark in (calls.begin, *(calls.thoughts or ())) if mark is not None]
        self._n_kept = max((len(mark.text.encode()) for mark in marks), default=0)

    def copy(self) -> Trigger:
        return copy(self)

    @property
    def is_single(self) -> bool:
        return self._calls.is_single

    def add(self, token_id: int) -> Matcher | None:
        """Advance by a token. Return a matcher that stands after this token if it begins a call."""
        mark = self._calls.begin
        if mark is None:
            return None
        piece = self._calls.tokens.of(token_id)
        self._tail = self._tail[-self._n_kept :] + piece
        if self._calls.thoughts is not None and (self._is_thinking or self._may_think):
            begin, end = self._calls.thoughts
            if self._may_think:
                self._is_thinking = begin.end_in(token_id, self._tail, len(piece)) is not None
                is_open = self._calls.thinks_anywhere or begin.text.encode().startswith(self._tail.lstrip())
                self._may_think = not self._is_thinking and is_open
            elif end.end_in(token_id, self._tail, len(piece)) is not None:
                self._is_thinking, self._may_think = False, self._calls.thinks_anywhere
            if self._is_thinking:
                return None
        n_behind = mark.end_in(token_id, self._tail, len(piece))
        return None if n_behind is None else self._begin(mark, self._tail[len(self._tail) - n_behind :])

    def force(self) -> Matcher:
        """Return a matcher for a call that begins with the next token."""
        self._tail = b""
        return self._calls.grammar.matcher()

    def _begin(self, mark: Mark, behind: bytes) -> Matcher | None:
        """Return a matcher after the mark and these bytes. None: the reply does not keep to the grammar there."""
        grammar, matcher = self._calls.grammar, self.force()
        ids = mark.tokens(grammar, behind)
        if matcher.count_allowed(ids) < len(ids):
            self.has_missed = True
            return None
        for each in ids:
            matcher.add(each)
        self.has_missed = matcher.error is not None
        return None if self.has_missed else matcher
