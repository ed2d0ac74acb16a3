"""Describes the texts around calls: before the first of a block, around each, between two, and after the last."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridmem.chat.tools.calls import ID, INDEX, Literals, Tool

MARK = re.compile(r"<[\w|｜/][^<>\s]*>|\[/?[A-Z_]+\]")
"""What most families write around calls and their parts."""
_PIECE = re.compile(rf"{MARK.pattern}|\s+|[^<\[\s]+|.", re.DOTALL)


@dataclass(frozen=True)
class Frame:
    """Holds the texts around calls as a chat template writes them.

    Attributes:
        begin: stands before the first call of a block.
        opening: stands before each call.
        closing: stands after each call.
        join: stands between two calls.
        end: stands after the last call of a block.
        is_single: whether a reply has one call only.
    """

    begin: str = ""
    opening: str = ""
    closing: str = ""
    join: str = ""
    end: str = ""
    is_single: bool = False

    @property
    def mark(self) -> str:
        """Return the text that begins a block, up to its first white space or bracket.

        Models vary white space and brackets.
        """
        return (self.begin.strip() or self.opening.strip()).partition("\n")[0].partition(" ")[0].rstrip("[{")

    @property
    def stop(self) -> str:
        """Return the text after which a block has ended. It is empty if the block is a list that ends by itself."""
        end = self.end.strip()
        inner = end.lstrip("]}").strip()
        end = inner if not inner or MARK.match(inner) else end
        return end or ("" if self.begin.strip() else self.closing.strip())

    @property
    def texts(self) -> tuple[str, ...]:
        return self.begin, self.opening, self.closing, self.join, self.end

    def rule(self, calls: Sequence[str], literals: Literals, *, is_parallel: bool) -> str:
        """Return the rules that put calls into this frame. Their rule `calls` matches one call, or several.

        Args:
            calls: the names of the rules of the calls.
        """
        opening, join, begin = self.opening, self.join, self.begin.lstrip()
        if not begin:  # White space before the first mark only separates it from earlier text.
            opening = self.opening.lstrip()
            join += self.opening.removesuffix(opening)
        one = _terms(literals(opening), f"({' | '.join(calls)})", literals(self.closing))
        more = f"({_terms(literals(join), 'call')})*" if is_parallel and not self.is_single else ""
        return f"calls: {_terms(literals(begin), 'call', more, literals(self.end))}\ncall: {one}"


@dataclass(frozen=True)
class FramedCalls(ABC):
    """Defines what the formats have in common whose calls are inside a frame and begin with the frame's mark.

    Attributes:
        frame: the texts around a call.
    """

    frame: Frame

    @property
    def begun_by(self) -> str:
        return self.frame.mark

    @property
    def has_blocks(self) -> bool:
        return bool(self.frame.begin.strip())

    @property
    def is_bare(self) -> bool:
        return False

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.frame.mark,)

    def rules(self, tools: Sequence[Tool], literals: Literals, *, is_parallel: bool) -> str:
        by_name = {f"call{i}": tool for i, tool in enumerate(tools)}
        frame = self.frame.rule(list(by_name), literals, is_parallel=is_parallel)
        return "\n".join([frame, *self.rules_of(by_name, literals)])

    @abstractmethod
    def rules_of(self, tools: Mapping[str, Tool], literals: Literals) -> list[str]:
        """Return the rules of calls without their frame.

        Args:
            tools: the tool that each rule calls, by the name of the rule.
        """


def _terms(*terms: str) -> str:
    return " ".join(term for term in terms if term)


def pieces(text: str) -> list[str]:
    """Split a text into marks, runs of white space, and words."""
    return _PIECE.findall(text)


def flexible(text: str) -> str:
    """Return a pattern for a text, in which any white space may stand for white space."""
    pattern = r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))
    return pattern.replace(re.escape(ID), r"[A-Za-z0-9_-]*").replace(re.escape(INDEX), r"\d+")
