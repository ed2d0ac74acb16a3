"""Finds out how a model writes calls and thoughts, from its chat template's output or from names in its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hybridmem.chat.special_tokens import template_text
from hybridmem.chat.tools.calls import CallFormat, Literals
from hybridmem.chat.tools.element_calls import infer_element_calls
from hybridmem.chat.tools.example import NAME, Example
from hybridmem.chat.tools.frames import Frame
from hybridmem.chat.tools.gemma_calls import infer_gemma_calls
from hybridmem.chat.tools.harmony import CHANNEL, END, MESSAGE, START, THOUGHTS_BEGIN, HarmonyCalls
from hybridmem.chat.tools.json_calls import JsonCalls, infer_json_calls
from hybridmem.chat.tools.named_calls import NamedCalls, infer_named_calls
from hybridmem.chat.tools.probing import Probe
from hybridmem.chat.tools.python_calls import PythonCalls, infer_python_calls
from hybridmem.chat.tools.writing import writer_of
from hybridmem.chat.tools.xml_calls import XmlCalls, infer_xml_calls

HERMES = JsonCalls(Frame(opening="<tool_call>\n", closing="\n</tool_call>", join="\n"))
JAMBA = JsonCalls(Frame("<tool_calls>[", join=", ", end="]</tool_calls>"))
NEMOTRON = JsonCalls(Frame("<TOOLCALL>[", join=", ", end="]</TOOLCALL>"))
GRANITE = JsonCalls(Frame("<|tool_call|>[", join=", ", end="]"))
QWEN = XmlCalls()
LFM = PythonCalls()
BARE = JsonCalls(Frame("[", join=", ", end="]"), is_bare=True)
"""The format for models that were not trained to call tools. A list of calls is the whole reply, and only if a call is
required.
"""

_INFER: tuple[Callable[[Example], CallFormat | None], ...] = (
    infer_json_calls, infer_named_calls, infer_xml_calls, infer_element_calls, infer_python_calls, infer_gemma_calls,
)  # fmt: skip
_SIGNS: tuple[tuple[str, CallFormat], ...] = (
    ("<tool_calls>", JAMBA),
    ("<TOOLCALL>", NEMOTRON),
    ("<|tool_call_start|>", LFM),
    ("<|tool_list_start|>", LFM),
    ("<|tool_call|>", GRANITE),
    ("<function=", QWEN),
    ("<tool_call>", HERMES),
)
"""A text in a template or a vocabulary -> the format, if the template writes no calls. The first that is found counts.
"""
THINK_BEGIN, THINK_END = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"
"""Llama 3 may write it before a call."""


@dataclass(frozen=True)
class Thoughts:
    """Holds the texts around thoughts."""

    begin: str = THINK_BEGIN
    end: str = THINK_END


@dataclass(frozen=True)
class Habits:
    """Says how a model writes calls and thoughts.

    Attributes:
        calls: the model's format of calls. None: it was not trained to call tools.
        thinks: whether the model may write thoughts.
        shows_special: whether marks are special tokens. If so, special tokens must be shown in the text of replies.
        special: the names of the special tokens. Those that are not marks are removed from the text that clients see.
        template: the source text of the chat template.
        thoughts: the texts around thoughts.
        token_ids: name -> id, of all tokens that were added to the vocabulary.
        has_channels: whether replies consist of messages in channels, as those of gpt-oss do.
        lacks: what the chat template does not show to the model, of "tools", "tool_calls" and "reasoning_content".
    """

    calls: CallFormat | None
    thinks: bool
    shows_special: bool
    special: frozenset[str]
    template: str
    thoughts: Thoughts = Thoughts()
    token_ids: Mapping[str, int] = field(default_factory=dict)
    has_channels: bool = False
    lacks: frozenset[str] = frozenset()

    @cached_property
    def literals(self) -> Literals:
        return Literals(self.token_ids)

    @property
    def write_calls(self) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        """Return the function that writes calls into contents, if the template leaves calls out and their format is
        known."""
        return writer_of(self.calls) if "tool_calls" in self.lacks else None

    def hidden_ids(self, calls: CallFormat | None) -> frozenset[int]:
        """Return the special tokens that are no marks of replies with such calls. They have no text in replies."""
        texts = self._marks_of_thoughts + (calls.literals if calls is not None else ())
        return frozenset(self.token_ids[name] for name in self.special if not any(name in text for text in texts))

    @property
    def _marks_of_thoughts(self) -> tuple[str, ...]:
        if self.has_channels:
            return CHANNEL, MESSAGE, START, END
        return (self.thoughts.begin, self.thoughts.end) if self.thinks else ()


def find_habits(tokenizer: Any) -> Habits:
    """Return how the tokenizer's model writes calls and thoughts."""
    template = template_text(tokenizer)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = frozenset(token.content for token in added.values() if token.special)
    token_ids = {token.content: i for i, token in added.items()}
    probe = Probe(tokenizer)
    example = probe.written_calls()
    calls = _infer(example, template) if example is not None else None
    if calls is None:
        calls = next((calls for sign, calls in _SIGNS if sign in template or sign in token_ids), None)
    thoughts, written = _find_thoughts(probe.written_thoughts(), template), probe.written_thoughts()
    has_channels = CHANNEL in probe.header and MESSAGE in probe.header
    if has_channels:
        thoughts = Thoughts(THOUGHTS_BEGIN, END)
        calls = HarmonyCalls(calls) if isinstance(calls, NamedCalls) else None
    texts = [*(() if thoughts is None else (thoughts.begin, thoughts.end)), *(calls.literals if calls else ())]
    texts += [CHANNEL, MESSAGE] if has_channels else []
    shows = {"tools": probe.shows_tools(), "tool_calls": example is not None, "reasoning_content": written is not None}
    return Habits(
        calls, thoughts is not None, any(name in text for name in special for text in texts), special, template,
        thoughts or Thoughts(), token_ids, has_channels, frozenset(name for name, shown in shows.items() if not shown),
    )  # fmt: skip


def _infer(example: Example, template: str) -> CallFormat | None:
    calls = next((calls for infer in _INFER if (calls := infer(example)) is not None), None)
    if calls is None or any(NAME in text for text in calls.literals):
        return None
    if isinstance(calls, JsonCalls) and calls.is_bare and PYTHON_TAG in template:
        return replace(calls, other_marks=(PYTHON_TAG,))
    return calls


def _find_thoughts(written: tuple[str, str] | None, template: str) -> Thoughts | None:
    """Return the texts around thoughts. Some templates never write them, but only remove them from earlier replies."""
    if written is not None:
        return Thoughts(*written)
    ends = ((THINK_BEGIN, THINK_END), ("[THINK]", "[/THINK]"))
    return next((Thoughts(begin, end) for begin, end in ends if end in template), None)
