"""Turns the pieces of a generation into the items of its reply, and into their events."""

from __future__ import annotations

from hybridmem.chat.engine.engine import Generation
from hybridmem.chat.engine.streaming import TextStream
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server.replies import Piece
from hybridmem.chat.server.sessions.writing import Writing
from hybridmem.chat.tools.reading import Reader


class Speaking:
    """Reads a reply as it comes. The reply may begin with the token ids of an earlier one.

    Args:
        opening: the token ids of an earlier reply with which it begins.
        end_ids: tokens that end a reply. They have no text.
        shows_special: whether special tokens appear as text, which the reader knows.
        hidden_ids: special tokens that never appear as text.
    """

    def __init__(
        self, writing: Writing, reader: Reader, tokenizer: Tokenizer | None, opening: tuple[int, ...],
        end_ids: tuple[int, ...], *, shows_special: bool, hidden_ids: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self._writing, self._reader = writing, reader
        self._end_ids = frozenset(end_ids)
        self._stream = TextStream(tokenizer, shows_special=shows_special, hidden_ids=hidden_ids) if opening else None
        self._opening = opening
        self._n_tokens = self._n_characters = 0

    def begin(self) -> list[str]:
        """Write the opening of the reply, and return its events."""
        if self._stream is None:
            return []
        return self._write("".join(self._stream.add(token_id) for token_id in self._opening))

    def add(self, piece: Piece) -> list[str]:
        """Add a piece, and return its events."""
        self._n_characters += len(piece.text)
        return self._write(piece.text if self._stream is None else self._decode(piece.generation))

    def end(self, generation: Generation) -> list[str]:
        """Write the remaining text and the end of the reply, and return the events."""
        if self._stream is None:
            written = self._write(generation.text[self._n_characters :])
        else:
            written = self._write(self._decode(generation) + self._stream.flush())
        for part in self._reader.close():
            written += self._writing.add(part)
        return written + self._writing.close(is_whole=generation.finish_reason == "stop")

    def _decode(self, generation: Generation) -> str:
        """Return the text of new tokens.

        The token before them is decoded with them, because a space between them may depend on it.
        """
        assert self._stream is not None, "the caller has looked"
        new = generation.token_ids[self._n_tokens :]
        self._n_tokens += len(new)
        return "".join(self._stream.add(token_id) for token_id in new if token_id not in self._end_ids)

    def _write(self, text: str) -> list[str]:
        return [event for part in self._reader.feed(text) for event in self._writing.add(part)] if text else []
