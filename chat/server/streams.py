"""Streams a reply in any dialect: it begins at once, and sends signs of life while the prompt is computed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridmem.chat.server.errors import ApiError, as_api_error
from hybridmem.chat.server.formats import DONE, as_event
from hybridmem.chat.server.replies import Piece, Replies

STATUS_SECONDS = 0.5
"""A stream waits this long for its first token before the status is sent, so that an error of the first step is still
a status. Clients try again by statuses, and not by events.
"""
Usage = Callable[[], dict[str, Any]]


class Style(Protocol):
    """Declares the chunks of one dialect of OpenAI's streams."""

    def opening(self, piece: Piece) -> dict[str, Any] | None: ...
    def pieces(self, piece: Piece) -> list[dict[str, Any]]: ...
    def progress(self, index: int, progress: dict[str, int]) -> dict[str, Any]: ...
    def usage(self, usage: dict[str, object]) -> dict[str, Any]: ...


class Writer(Protocol):
    """Declares how the stream of one reply is written. Each method returns events as text, or "" for none."""

    def begin(self) -> str:
        """Return the text that is sent before anything is known of the reply."""
        ...

    def wait(self) -> str:
        """Return the text that says that the prompt is still being computed."""
        ...

    def add(self, piece: Piece, usage: Usage) -> str: ...
    def end(self, usage: Usage) -> str: ...
    def fail(self, error: ApiError) -> str: ...


@dataclass
class OpenAIWriter:
    """Writes OpenAI's streams of completions.

    Attributes:
        includes_usage: whether the last chunk has the usage. includes_continuous_usage: whether every chunk has it.
    """

    style: Style
    includes_usage: bool = False
    includes_continuous_usage: bool = False
    _seen: set[int] = field(default_factory=set)

    def begin(self) -> str:
        return ""

    def wait(self) -> str:
        return ": the prompt is being computed\n\n"  # This is a comment, which clients of events skip.

    def add(self, piece: Piece, usage: Usage) -> str:
        about: dict[str, Any] = {"usage": None} if self.includes_usage else {}
        if self.includes_continuous_usage:
            about = {"usage": usage()}
        if piece.progress is not None:
            return as_event(self.style.progress(piece.index, piece.progress) | about)
        events = ""
        if piece.index not in self._seen:
            self._seen.add(piece.index)
            opening = self.style.opening(piece)
            if opening is not None:
                events = as_event(opening | about)
        return events + "".join(as_event(chunk | about) for chunk in self.style.pieces(piece))

    def end(self, usage: Usage) -> str:
        return (as_event(self.style.usage(usage())) if self.includes_usage else "") + DONE

    def fail(self, error: ApiError) -> str:
        return as_event(error.body)


async def first_piece(replies: Replies) -> Piece | None:
    """Return the first piece of a stream, or None if there is none yet. Raises the error that ended a generation."""
    try:
        return await replies.next(STATUS_SECONDS)
    except TimeoutError:
        return None


async def write_stream(replies: Replies, first: Piece | None, writer: Writer) -> AsyncGenerator[str, None]:
    """Yield the events of a stream. All new text of a step comes in one event.

    So there are few sends, each of which releases the interpreter's lock.

    Args:
        first: the first piece, if it is there already.
    """
    try:
        opening = writer.begin()
        opening += writer.wait() if first is None else writer.add(first, replies.usage)
        if opening:
            yield opening
        async for piece in replies.pieces():
            events = writer.wait() if piece is None else writer.add(piece, replies.usage)
            if events:
                yield events
        yield writer.end(replies.usage)
    except Exception as error:  # The status has been sent already.
        yield writer.fail(as_api_error(error))
