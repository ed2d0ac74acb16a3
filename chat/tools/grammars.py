"""Makes the grammar of a reply: what its format asks for, or calls of tools, perhaps behind thoughts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybridmem.chat.sampling.grammar import Grammar, GrammarError, Grammars, json_rule
from hybridmem.chat.tools.calls import CallFormat, Tool
from hybridmem.chat.tools.families import THINK_END, Habits

MOST_GRAMMAR = 64 << 10
"""Characters of a schema, pattern or grammar."""


@dataclass(frozen=True)
class Shape:
    """Is the form that the content of a reply must have.

    Attributes:
        kind: "json": `value` is a schema; "choice": texts; "regex" and "lark": a pattern and a grammar.
        name: of the parameter that asked for it, for errors.
    """

    kind: Literal["json", "choice", "regex", "lark"]
    value: Any
    name: str = "response_format"


@dataclass(frozen=True)
class Required:
    """Says that a reply must be calls of these tools.

    Attributes:
        format: how they are written.
        is_parallel: there may be several.
    """

    tools: Sequence[Tool]
    format: CallFormat
    is_parallel: bool


def make_grammar(
    grammars: Grammars, habits: Habits, shape: Shape | None, calls: Required | None, *, must_call: bool,
    is_thinking: bool,
) -> Grammar | None:  # fmt: skip
    """Return the grammar of a reply; None if any text will do.

    Args:
        shape: of its content; None: any.
        calls: that it may make instead; with `must_call` it makes them.
        is_thinking: the prompt ended with the mark that begins thoughts: these come first, and are any text.
    Raises:
        GrammarError: naming what cannot be enforced.
    """
    if shape is None and not must_call:
        return None
    if shape is not None and len(json.dumps(shape.value)) > MOST_GRAMMAR:
        raise GrammarError(f"it has more than {MOST_GRAMMAR:,} characters")
    if calls is None and not is_thinking:
        assert shape is not None, "there is one of the two"
        return _alone(grammars, shape)

    def mark(text: str) -> str:
        return text if text in habits.special else json.dumps(text)

    bodies, rules = [], []
    if shape is not None and not must_call:
        bodies.append("content")
        rules.append(f"content: {_content(shape)}")
    if calls is not None:
        bodies.append("calls")
        rules.append(calls.format.rules(calls.tools, mark, is_parallel=calls.is_parallel))
    start = f"start: {'thought ' if is_thinking else ''}({' | '.join(bodies)})"
    if is_thinking:
        thought = f"thought: /(.|\\n)*/ {THINK_END} gap" if THINK_END in habits.special else _ENDED_THOUGHT
        rules += [thought, "gap: /\\n{0,2}/"]
    return grammars.lark("\n".join([start, *rules]))


_ENDED_THOUGHT = "thought: thoughts gap\nthoughts[lazy]: /(.|\\n)*<\\/think>/"


def _alone(grammars: Grammars, shape: Shape) -> Grammar:
    read = {
        "json": grammars.json_schema, "choice": grammars.choice, "regex": grammars.regex, "lark": grammars.lark,
    }[shape.kind]  # fmt: skip
    return read(shape.value)


def _content(shape: Shape) -> str:
    """Return a shape as the right side of a rule."""
    if shape.kind == "json":
        return json_rule(shape.value if isinstance(shape.value, dict) else {})
    if shape.kind == "choice":
        return " | ".join(json.dumps(text) for text in shape.value)
    if shape.kind == "regex":
        return "/" + str(shape.value).replace("/", "\\/") + "/"
    return f"%lark {{\n{shape.value}\n}}"
