"""Finds out how a model writes calls and thoughts, by the names in its chat template and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridmem.chat.special_tokens import template_text
from hybridmem.chat.tools.calls import CallFormat
from hybridmem.chat.tools.frames import Frame
from hybridmem.chat.tools.json_calls import JsonCalls
from hybridmem.chat.tools.python_calls import PythonCalls
from hybridmem.chat.tools.xml_calls import XmlCalls

HERMES = JsonCalls(Frame(opening="<tool_call>\n", closing="\n</tool_call>", join="\n"))
JAMBA = JsonCalls(Frame("<tool_calls>[", join=", ", end="]</tool_calls>"))
NEMOTRON = JsonCalls(Frame("<TOOLCALL>[", join=", ", end="]</TOOLCALL>"))
QWEN = XmlCalls()
LFM = PythonCalls()
BARE = JsonCalls(Frame("[", join=", ", end="]"), is_bare=True)
"""The format for models that were not trained to call tools. A list of calls is the whole reply, and only if a call is
required.
"""

THINK_BEGIN, THINK_END = "<think>", "</think>"
_SIGNS: tuple[tuple[str, CallFormat], ...] = (
    ("<tool_calls>", JAMBA),
    ("<TOOLCALL>", NEMOTRON),
    ("<|tool_call_start|>", LFM),
    ("<|tool_list_start|>", LFM),
    ("<function=", QWEN),
    ("<tool_call>", HERMES),
)
"""A text in a template or a vocabulary -> the format. The first text that is found counts."""


@dataclass(frozen=True)
class Thoughts:
    """Holds the texts around thoughts."""

    begin: str = THINK_BEGIN
    end: str = THINK_END


@dataclass(frozen=True)
class Habits:
    """Says how a model writes calls and thoughts.

    Attributes:
        calls: its format of calls. None: it was not trained to call tools.
        thinks: whether it may write thoughts.
        shows_special: whether marks are special tokens. Special tokens must be shown in the text of replies then.
        special: the names of the special tokens. Those that are not marks are removed from what clients see.
        template: the source text of the chat template.
        thoughts: the texts around thoughts.
        token_ids: name -> id, of all tokens that were added to the vocabulary.
    """

    calls: CallFormat | None
    thinks: bool
    shows_special: bool
    special: frozenset[str]
    template: str
    thoughts: Thoughts = Thoughts()
    token_ids: Mapping[str, int] = field(default_factory=dict)


def find_habits(tokenizer: Any) -> Habits:
    """Return how the model of a tokenizer writes."""
    template = template_text(tokenizer)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = frozenset(token.content for token in added.values() if token.special)
    token_ids = {token.content: i for i, token in added.items()}
    calls = next((calls for sign, calls in _SIGNS if sign in template or sign in token_ids), None)
    thinks = THINK_END in template
    texts = [THINK_BEGIN, THINK_END] if thinks else []
    texts += calls.literals if calls is not None else ()
    shows_special = any(name in text for name in special for text in texts)
    return Habits(calls, thinks, shows_special, special, template, token_ids=token_ids)
