"""Decodes tokens to text as they come. It returns whole characters only, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from hybridmem.chat.prompts import Tokenizer
from hybridmem.memory.sequences import plain_ids

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Tokenizers decode bytes to this if they are not a character, or not yet a whole one."""


CONTEXT_TOKENS = 8
"""So many tokens before a reply are enough to decode its first characters as they stand after these."""


class TextStream:
    """Decodes the text of a reply that grows token by token.

    Text is held back while a later token could complete a character, or could show that the text is the start of a stop
    string. Special tokens have no text unless they are to be shown.

    Args:
        tokenizer: decodes the tokens. None: there is no text at all.
        stop: strings that end the text. It is cut before the first of them.
        shows_special: whether special tokens appear in the text by their names.
        hidden_ids: special tokens that have no text, even if others are shown.
        before: the last tokens of the text that this one continues; none if it is a text of its own.
    Attributes:
        text: all text that was returned so far.
        stopped_by: the stop string that was found. Nothing is added after it.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop: tuple[str, ...] = (), *, shows_special: bool = False,
        hidden_ids: frozenset[int] = frozenset(), before: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.text = ""
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._stop = stop
        self._skips_special = not shows_special
        self._hidden_ids = hidden_ids if shows_special else frozenset()
        self._held = ""  # This text is decoded but not shown yet, because it may be the start of a stop string.
        # Tokens are decoded together with those of the piece before: a space may depend on what stands to its left.
        self._window: list[int] = plain_ids(before)
        self._n_before = len(self._window)  # This many tokens of the window belong to the piece before.
        # This many characters of the window's text were taken already.
        self._n_taken = len(self._decode(self._window).rstrip(_INCOMPLETE)) if self._window else 0

    def ahead(self) -> TextStream:
        """Return an independent copy."""
        stream = copy(self)
        stream._window = [*self._window]
        return stream

    @property
    def holds_text(self) -> bool:
        """Return whether the newest tokens may have text that is not shown yet."""
        return bool(self._held) or len(self._window) > self._n_before

    def add(self, token_id: int, *, may_stop: bool = True) -> str:
        """Return the text that this token completes. Cost: the decoding of a few tokens.

        Args:
            may_stop: whether to look for stop strings.
        """
        if self._tokenizer is None or self.stopped_by is not None or token_id in self._hidden_ids:
            return ""
        self._window.append(token_id)
        decoded = self._decode(self._window)
        whole = decoded.rstrip(_INCOMPLETE)
        new = whole[self._n_taken :]
        self._n_taken = max(self._n_taken, len(whole))
        if new and whole == decoded:
            self._window = self._window[self._n_before :]
            self._n_before = len(self._window)
            self._n_taken = len(self._decode(self._window))
        return self._show(new, may_stop=may_stop)

    def flush(self) -> str:
        """Return the text that was held back. No token follows.

        Bytes that are not a character become replacement characters.
        """
        if self._tokenizer is None or self.stopped_by is not None:
            return ""
        rest = self._decode(self._window)[self._n_taken :]
        self._n_taken += len(rest)
        return self._show(rest, is_end=True)

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special))

    def _show(self, new: str, *, is_end: bool = False, may_stop: bool = True) -> str:
        self._held += new
        # No stop string can begin in what was shown: it would have been held back.
        stops = self._stop if may_stop else ()
        found = [(at + len(stop), at, stop) for stop in stops if (at := self._held.find(stop)) >= 0]
        if found:  # Take the stop string that was complete first, however the tokens cut the text.
            _, n_shown, self.stopped_by = min(found)
        else:
            n_shown = len(self._held) - (0 if is_end else self._n_suspect())
        piece, self._held = self._held[:n_shown], self._held[n_shown:]
        self.text += piece
        return piece

    def _n_suspect(self) -> int:
        """Return the length of the longest suffix of the text that may be the start of a stop string."""
        held = self._held
        return max(
            (n for stop in self._stop for n in range(1, min(len(stop), len(held) + 1)) if held.endswith(stop[:n])),
            default=0,
        )
