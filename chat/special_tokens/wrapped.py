"""Wraps a tokenizer together with what one prompt needs: options of the chat template, pictures, calls and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridmem.chat.special_tokens.marks import KnownPictures
from hybridmem.memory import FormatError


@dataclass(frozen=True)
class PromptContext:
    """Says what is needed, beside a tokenizer, to turn the messages of one prompt into token ids.

    Attributes:
        template_options: the options of the chat template, such as its tools.
        pictures: the pictures of the prompt. None: there are none.
        write_calls: writes the calls of a message into its content. None: the chat template writes them.
        check_text: raises an error if a rendered text is too long to be encoded. None: no text is.
    """

    template_options: Mapping[str, Any] = field(default_factory=dict)
    pictures: KnownPictures | None = None
    write_calls: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    check_text: Callable[[str], None] | None = None


class WrappedTokenizer:
    """Is used like the tokenizer that it wraps, and carries the context of a prompt.

    Attributes:
        bare: the tokenizer of transformers.
        context: what the prompt needs beside the tokenizer.
    """

    def __init__(self, bare: Any, context: PromptContext) -> None:
        self.bare = bare
        self.context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["bare"], name)


def bare_of(tokenizer: Any) -> Any:
    """Return the tokenizer of transformers, whether it is wrapped or not."""
    return tokenizer.bare if isinstance(tokenizer, WrappedTokenizer) else tokenizer


def context_of(tokenizer: Any) -> PromptContext:
    """Return the context that a tokenizer carries. One that is not wrapped carries nothing."""
    return tokenizer.context if isinstance(tokenizer, WrappedTokenizer) else PromptContext()


def ids_of_picture(tokenizer: Any, name: str) -> list[int]:
    """Return the token ids of a picture. Raises FormatError if the tokenizer's context does not know it."""
    pictures = context_of(tokenizer).pictures
    ids = None if pictures is None else pictures.picture_ids(name)
    if ids is None:
        raise FormatError("a message names a picture that is not with it, or that this model cannot see")
    return ids


def place_pictures(tokenizer: Any, token_ids: list[int], n_before: int) -> list[int]:
    """Return a prompt with pictures as the model wants it, where `n_before` pictures stand before these tokens."""
    pictures = context_of(tokenizer).pictures
    return token_ids if pictures is None else pictures.placed(token_ids, tokenizer.convert_tokens_to_ids, n_before)
