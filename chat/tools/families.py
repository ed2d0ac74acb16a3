"""Finds out how a model writes calls and thoughts, by the names in its chat template and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridmem.chat.special_tokens import template_text
from hybridmem.chat.tools.calls import CallFormat
from hybridmem.chat.tools.json_calls import JsonCalls
from hybridmem.chat.tools.python_calls import PythonCalls
from hybridmem.chat.tools.xml_calls import XmlCalls

HERMES = JsonCalls("<tool_call>", "</tool_call>", padding="\n")
JAMBA = JsonCalls("<tool_calls>", "</tool_calls>", is_list=True)
NEMOTRON = JsonCalls("<TOOLCALL>", "</TOOLCALL>", is_list=True)
QWEN = XmlCalls()
LFM = PythonCalls()
BARE = JsonCalls("", "", is_list=True)
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
class Habits:
    """Says how a model writes calls and thoughts.

    Attributes:
        calls: its format of calls. None: it was not trained to call tools.
        thinks: whether it may write thoughts between <think> and </think>.
        shows_special: whether marks are special tokens. Special tokens must be shown in the text of replies then.
        special: the names of the special tokens. Those that are not marks are removed from what clients see.
        template: the source text of the chat template.
    """

    calls: CallFormat | None
    thinks: bool
    shows_special: bool
    special: frozenset[str]
    template: str


def find_habits(tokenizer: Any) -> Habits:
    """Return how the model of a tokenizer writes."""
    template = template_text(tokenizer)
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = frozenset(token.content for token in added if token.special)
    known = {token.content for token in added}
    calls = next((calls for sign, calls in _SIGNS if sign in template or sign in known), None)
    thinks = THINK_END in template
    marks = {THINK_BEGIN, THINK_END} if thinks else set()
    marks |= {calls.begin, calls.end} if calls is not None else set()
    return Habits(calls, thinks, bool(marks & special), special, template)
