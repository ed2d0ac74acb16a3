"""Finds the names of special tokens in texts, and encodes texts so that they are ordinary text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerFast

from hybridmem.chat.special_tokens.templates import rendered_samples, template_text
from hybridmem.chat.special_tokens.twin import Piece, Twin
from hybridmem.chat.special_tokens.wrapped import bare_of
from hybridmem.memory import FormatError

Tokenizer = Any
"""A tokenizer of transformers. Its classes have no common type that mypy could use."""


@dataclass(frozen=True)
class SpecialTokens:
    """Holds the special tokens of a tokenizer, and encodes text so that none of them appears.

    Attributes:
        names: name -> id, of the tokens that the tokenizer calls special, and of other added tokens that the chat
            template writes. In replies, only tokens that the tokenizer calls special count, because a reply may contain
            marks of its own, such as those around thoughts.
    """

    tokenizer: Tokenizer
    names: dict[str, int]

    def are_in(self, text: str) -> bool:
        """Return whether a name may be in a text, in any capitalization and Unicode form.

        Some tokenizers change texts before they look for names.
        """
        return self._folded is not None and self._folded.search(_fold(text)) is not None

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of text that people wrote. None is special, except the one for unknown characters.

        Raises FormatError if the tokenizer cannot encode the text without special tokens.
        """
        if not self.are_in(text):
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return self.encode_cut(text, self.cuts_in(text))

    def cuts_in(self, text: str, *, is_followed: bool = False) -> list[int]:
        """Return the places at which the names in a text are cut, so that they are no longer names.

        Args:
            is_followed: whether other text may follow. If so, an incomplete name at the end is cut as well.
        """
        cuts = set[int]()
        if self.are_in(text):
            signs = [(i, sign) for i, each in enumerate(text) for sign in _fold(each)]
            folded, at = "".join(sign for _, sign in signs), 0
            while (found := self._folded.search(folded, at)) is not None:  # type: ignore[union-attr]
                start, end = signs[found.start()][0], signs[found.end() - 1][0]
                cuts.add(min(start + 1, end))
                at = found.start() + 1
            if not cuts:  # Here the name appears only after the tokenizer has joined some characters of the text.
                cuts.update(range(1, len(text)))
        if is_followed and text and text[-1] in self._inner:
            tail = _fold(text[-self._longest :])
            begun = next((n for n in range(len(tail), 0, -1) if tail[-n:] in self._beginnings), 0)
            if begun:
                cuts.add(len(text) - min(begun, len(text)) + 1)
        return sorted(cuts)

    def encode_cut(self, text: str, cuts: Sequence[int]) -> list[int]:
        """Return the token ids of a text in which a name is a special token unless it is cut.

        Everything else has the tokens that it always has. Raises FormatError as `encode_text`.
        """
        for pieces in (self._pieces(text, cuts), self._cut_pieces(text, cuts)):
            found = self._twin.encode(pieces) if self._twin is not None else self._encode_apart(pieces)
            if self._special.isdisjoint(i for i, is_own in found if not is_own):
                return [i for i, _ in found]
            # The vocabulary also has the name as an ordinary word. So no token may reach across a cut.
        raise FormatError(
            f"this tokenizer has no way to write {text[:100]!r} without its special tokens; leave them out"
        )

    def _pieces(self, text: str, cuts: Iterable[int]) -> list[Piece]:
        """Split a text into its special tokens and the texts between them."""
        pieces, at, is_cut = list[Piece](), 0, set(cuts)
        found = self._exact.search(text) if self._exact is not None else None
        while found is not None:
            inside = range(found.start() + 1, found.end()) if len(found[0]) > 1 else range(found.start(), found.end())
            if is_cut.isdisjoint(inside):
                pieces += [(text[at : found.start()], None), (found[0], self.names[found[0]])]
                at = found.end()
            found = self._exact.search(text, max(at, found.start() + 1))  # type: ignore[union-attr]
        return [piece for piece in [*pieces, (text[at:], None)] if piece[0]]

    def _cut_pieces(self, text: str, cuts: Sequence[int]) -> list[Piece]:
        """Split a text into its special tokens, and the texts between them and the cuts."""
        pieces, at = list[Piece](), 0
        for piece, token_id in self._pieces(text, cuts):
            end = at + len(piece)
            places = [at, *(cut for cut in cuts if at < cut < end), end] if token_id is None else []
            pieces += [(text[i:j], None) for i, j in pairwise(places)] or [(piece, token_id)]
            at = end
        return pieces

    def _encode_apart(self, pieces: Iterable[Piece]) -> list[tuple[int, bool]]:
        """Encode each piece by itself, as a slow tokenizer can."""
        found = list[tuple[int, bool]]()
        for text, token_id in pieces:
            if token_id is not None:
                found.append((token_id, True))
            else:
                ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
                found += [(i, False) for i in ids]
        return found

    @cached_property
    def _exact(self) -> re.Pattern[str] | None:
        names = sorted(self.names, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    @cached_property
    def _folded(self) -> re.Pattern[str] | None:
        names = sorted(map(_fold, self.names), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        """Return all proper beginnings of names."""
        return frozenset(name[:n] for name in map(_fold, self.names) for n in range(1, len(name)))

    @cached_property
    def _inner(self) -> frozenset[str]:
        """Return the characters that a name may have before its last one."""
        return frozenset(sign for name in self.names for sign in (*name[:-1], *_fold(name)[:-1]))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.names), default=1)

    @cached_property
    def _special(self) -> set[int]:
        return set(self.names.values()) - {self.tokenizer.unk_token_id}

    @cached_property
    def _twin(self) -> Twin | None:
        if not isinstance(self.tokenizer, PreTrainedTokenizerFast):
            return None
        added = {token.content: token for token in self.tokenizer.added_tokens_decoder.values()}
        return Twin(self.tokenizer, self.names, added)


_known: WeakKeyDictionary[Any, tuple[str, SpecialTokens, SpecialTokens]] = WeakKeyDictionary()


def special_tokens_of(tokenizer: Tokenizer, role: str = "user") -> SpecialTokens:
    """Return the special tokens that must stay text in a message of this role.

    They are computed once for each tokenizer and chat template.
    """
    tokenizer = bare_of(tokenizer)  # A wrapped tokenizer may refuse long texts, and has the same special tokens.
    template = template_text(tokenizer)
    known = _known.get(tokenizer)
    if known is None or known[0] != template:
        added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        special = {token.content: i for i, token in added.items() if token.special}
        shown = template + rendered_samples(tokenizer)
        written = {token.content: i for i, token in added.items() if token.content in shown}
        known = _known[tokenizer] = (
            template,
            SpecialTokens(tokenizer, special | written),
            SpecialTokens(tokenizer, special),
        )
    return known[2] if role == "assistant" else known[1]


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()
