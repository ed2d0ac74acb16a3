"""Encodes texts in which only chosen places hold special tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

import tokenizers
from transformers import PreTrainedTokenizerFast

Piece = tuple[str, int | None]
"""A piece of a text. It is a special token with this id, or ordinary text."""


class Twin:
    """Holds a copy of a fast tokenizer that does not find the names, but finds secret marks that replace them.

    It is a copy, because other threads would notice if the names were switched off and on in the original.

    Args:
        names: name -> id.
        added: name -> the tokenizer's own description of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, names: Mapping[str, int], added: Mapping[str, Any]) -> None:
        twin = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        twin.no_truncation()
        twin.no_padding()
        twin.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
        twin.encode_special_tokens = True
        # Nobody can guess these marks. A token's mark takes the white space that the token takes.
        secret = uuid4().hex
        self._marks = {i: f"\N{WORD JOINER}{secret}{i}\N{WORD JOINER}" for i in names.values()}
        self._cut = f"\N{WORD JOINER}{secret}\N{WORD JOINER}"
        sides = {names[name]: (token.lstrip, token.rstrip) for name, token in added.items() if name in names}
        marks = [
            tokenizers.AddedToken(mark, special=False, normalized=False, lstrip=sides[i][0], rstrip=sides[i][1])
            for i, mark in self._marks.items()
        ]
        twin.add_tokens([*marks, tokenizers.AddedToken(self._cut, special=False, normalized=False)])
        self._ids = {twin.token_to_id(mark): i for i, mark in self._marks.items()}
        self._cut_id = twin.token_to_id(self._cut)
        self._tokenizer = twin

    def encode(self, pieces: Iterable[Piece]) -> list[tuple[int, bool]]:
        """Return the ids of a text, and whether each is the id of a special token that is a piece.

        No token reaches across two pieces.
        """
        text, was_text = "", False
        for piece, token_id in pieces:
            if token_id is None:
                text += (self._cut if was_text else "") + piece
            else:
                text += self._marks[token_id]
            was_text = token_id is None
        found = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [(self._ids.get(i, i), i in self._ids) for i in found if i != self._cut_id]
