"""Wraps a tokenizer together with what one prompt needs: options of the chat template, pictures, calls and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridmem.chat.special_tokens.marks import FindIds
from hybridmem.memory import FormatError


@dataclass(frozen=True)
class PromptContext:
    """Says what is needed, beside a tokenizer, to turn the messages of one prompt into token ids.

    Attributes:
        template_options: the options of the chat template, such as its tools.
        picture_ids: returns the token ids of a picture of the prompt by its name. None: there are no pictures.
        write_calls: writes the calls of a message into its content. None: the chat template writes them.
        check_text: raises an error if a rendered text is too long to be encoded. None: no text is.
    """

    template_options: Mapping[str, Any] = field(default_factory=dict)
    picture_ids: FindIds | None = None
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
    find = context_of(tokenizer).picture_ids
    ids = None if find is None else find(name)
    if ids is None:
        raise FormatError("a message names a picture that is not with it, or that this model cannot see")
    return ids
