"""Keeps special tokens that a user only wrote as text from having an effect, such as the end of a turn.

A tokenizer finds the names of special tokens wherever they stand, in a user's message as in the chat template around
it. A message that contains them could forge a turn. So if people's text contains such a name, that text is encoded by
itself, character by character.
"""

from __future__ import annotations

import re
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import tokenizers
from transformers import PreTrainedTokenizerFast

from hybridmem.memory import FormatError

_ROLES = "user", "assistant", "system", "tool", "developer"
Tokenizer = Any
"""A tokenizer of transformers. Its classes have no common type that mypy could use."""


@dataclass(frozen=True)
class SpecialTokens:
    """Holds the special tokens of a tokenizer, and encodes text so that none of them appears.

    Attributes:
        names: name -> id, of the tokens that the tokenizer calls special and of the other marks that the chat template
            writes. In replies only the former count, because a reply may contain marks of its own, such as those around
            thoughts.
    """

    tokenizer: Tokenizer
    names: dict[str, int]

    def are_in(self, text: str) -> bool:
        """Return whether a name may be in a text, in any case and form.

        Some tokenizers change texts before they search.
        """
        return self.pattern is not None and self.pattern.search(_folded(text)) is not None

    def count(self, text: str) -> int:
        return 0 if self.pattern is None else len(self.pattern.findall(_folded(text)))

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        names = sorted(map(_folded, self.names), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of text that people wrote. None is special, except the one for unknown characters.

        Raises FormatError if the tokenizer cannot encode the text without special tokens.
        """
        if not self.are_in(text):
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        found = self._encode(text)
        if self._special.isdisjoint(found):
            return found
        # The vocabulary itself has the name as a word. So cut the text behind each first letter of a name.
        firsts = {name[0] for name in self.names}
        pieces = [piece for piece in re.split("(?<=[" + re.escape("".join(sorted(firsts))) + "])", text) if piece]
        found = [i for piece in pieces for i in self._encode(piece)]
        if not self._special.isdisjoint(found):
            raise FormatError(
                f"this tokenizer has no way to write {text[:100]!r} without its special tokens; leave them out"
            )
        return found

    def _encode(self, text: str) -> list[int]:
        if self._blind is not None:
            return list(self._blind.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    @cached_property
    def _special(self) -> set[int]:
        return set(self.names.values()) - {self.tokenizer.unk_token_id}

    @cached_property
    def _blind(self) -> tokenizers.Tokenizer | None:
        """Return a copy of the tokenizer that finds none of the names.

        It is a copy, because other threads would notice if the names were switched off and on in the original.
        """
        if not isinstance(self.tokenizer, PreTrainedTokenizerFast):
            return None
        blind = tokenizers.Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        blind.no_truncation()
        blind.no_padding()
        blind.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in self.names])
        blind.encode_special_tokens = True
        return blind


_known: WeakKeyDictionary[Any, tuple[str, SpecialTokens, SpecialTokens]] = WeakKeyDictionary()


def special_tokens_of(tokenizer: Tokenizer, role: str = "user") -> SpecialTokens:
    """Return the special tokens that must stay text in a message of this role.

    They are computed once for each tokenizer and chat template.
    """
    # A server's tokenizer refuses long texts. The tokenizer inside of it has the same special tokens.
    tokenizer = getattr(tokenizer, "unbounded", tokenizer)
    template = template_text(tokenizer)
    known = _known.get(tokenizer)
    if known is None or known[0] != template:
        added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        special = {token.content: i for i, token in added.items() if token.special}
        shown = template + _rendered_samples(tokenizer)
        written = {token.content: i for i, token in added.items() if token.content in shown}
        known = _known[tokenizer] = (
            template,
            SpecialTokens(tokenizer, special | written),
            SpecialTokens(tokenizer, special),
        )
    return known[2] if role == "assistant" else known[1]


def template_text(tokenizer: Tokenizer) -> str:
    """Return the source of the chat template, or of all of them if the tokenizer has several with names."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


def find_turn_end(tokenizer: Tokenizer) -> int | None:
    """Return the token that the chat template writes right behind a reply; None if that is no added token."""
    reply = "x7e2"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": reply}, {"role": "user", "content": "b"}]
    # A template is a program of the checkpoint, and may refuse this chat.
    with suppress(Exception):
        rendered = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        first = tokenizer.encode(rendered.partition(reply)[2].lstrip(), add_special_tokens=False)[0]
        return int(first) if first in tokenizer.added_tokens_decoder else None
    return None


def _rendered_samples(tokenizer: Tokenizer) -> str:
    """Return what the chat templates write around messages of each role.

    A template may put a mark together from parts, such as "<|" + role + "|>": its source does not hold the mark's name.
    """
    template = getattr(tokenizer, "chat_template", None)
    names = [None] if isinstance(template, str) else [*(template or ())]
    chats = [[{"role": role, "content": "x"}] for role in _ROLES]
    chats += [[*chats[0], *chat] for chat in chats[1:]]
    chats.append([{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")])
    texts = list[str]()
    for name, chat, awaits_reply in product(names, chats, (False, True)):
        # A template is a program of the checkpoint, and refuses most of these orders of roles.
        with suppress(Exception):
            options = {"add_generation_prompt": awaits_reply, "tokenize": False}
            texts.append(str(tokenizer.apply_chat_template(chat, chat_template=name, **options)))
    return "\n".join(texts)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()
