"""Cuts the names of special tokens in the inputs of a chat template, and finds the cuts in the rendered text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any
from uuid import uuid4

from hybridmem.chat.special_tokens.marks import names_in, split_at_marks
from hybridmem.chat.special_tokens.tokens import SpecialTokens, Tokenizer, special_tokens_of
from hybridmem.chat.special_tokens.wrapped import ids_of_picture, place_pictures

_OWN = ("content", "reasoning_content", "reasoning", "thinking")
"""The fields that hold what a model itself said. Marks that are not special tokens are its own there."""
_ROLES = frozenset(("user", "assistant", "system", "tool", "developer"))


@dataclass(frozen=True)
class Rendered:
    """Holds the text that a chat template has rendered.

    Attributes:
        text: the text.
        cuts: the positions in the text at which names of special tokens are cut. Such a name came from an input of the
            template, and must stay text.
    """

    text: str
    cuts: tuple[int, ...] = ()

    def encode(self, tokenizer: Tokenizer, start: int = 0, end: int | None = None) -> list[int]:
        """Return the token ids of a part of the text, with those of pictures in place of their marks.

        Raises FormatError if the tokenizer cannot encode a name without its special token, or does not know a picture.
        """
        ids, is_seeing = list[int](), False
        for begin, stop, name in split_at_marks(self.text, start, len(self.text) if end is None else end):
            if name is not None:
                ids += ids_of_picture(tokenizer, name)
                is_seeing = True
            elif begin < stop:
                ids += self._encode(tokenizer, begin, stop)
        return place_pictures(tokenizer, ids, len(names_in(self.text[:start]))) if is_seeing else ids

    def _encode(self, tokenizer: Tokenizer, start: int, end: int) -> list[int]:
        text, cuts = self.text[start:end], [cut - start for cut in self.cuts if start <= cut < end]
        if not cuts:
            return list(tokenizer.encode(text, add_special_tokens=False))
        return special_tokens_of(tokenizer).encode_cut(text, cuts)


Read = Callable[[str], Rendered]


def protect(tokenizer: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[Any, Any, Read]:
    """Cut the names of special tokens in messages, and in options of the template such as its tools.

    Returns:
        The messages and the options with the names cut, and a function that finds the cuts in the rendered text. Most
        often there is nothing to cut, and they are what was given.
    """
    strict, own = special_tokens_of(tokenizer), special_tokens_of(tokenizer, "assistant")
    if not any(strict.cuts_in(text, is_followed=True) for text in _texts((messages, options))):
        return messages, options, Rendered
    whole = "\n".join(_texts((messages, options)))
    seam = next(seam for seam in iter(lambda: uuid4().hex[:8], None) if seam not in whole)
    cut = [
        {name: _cut_field(message, name, value, strict, own, seam) for name, value in message.items()}
        for message in messages
    ]
    return cut, _cut(options, strict, seam), lambda text: _read(text, seam)


def _cut_field(
    message: dict[str, Any], name: str, value: Any, strict: SpecialTokens, own: SpecialTokens, seam: str
) -> Any:
    if name == "role" and value in _ROLES:
        return value
    return _cut(value, own if message.get("role") == "assistant" and name in _OWN else strict, seam)


def _cut(value: Any, tokens: SpecialTokens, seam: str) -> Any:
    """Insert a seam into each name of a special token in a value."""
    if isinstance(value, str):
        cuts = tokens.cuts_in(value, is_followed=True)
        if not cuts:
            return value
        places = [0, *cuts, len(value)]
        return seam.join(value[start:end] for start, end in pairwise(places))
    if isinstance(value, dict):
        return {_cut(key, tokens, seam): _cut(inner, tokens, seam) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(inner, tokens, seam) for inner in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _read(text: str, seam: str) -> Rendered:
    """Remove the seams from a text, and return it with their positions."""
    parts = text.split(seam)
    return Rendered("".join(parts), tuple(accumulate(map(len, parts[:-1]))))
