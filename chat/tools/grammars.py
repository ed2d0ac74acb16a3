"""Makes the grammar of a reply, from its format or from the tools that it may call. Thoughts may come first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from hybridmem.chat.sampling.grammar import Grammar, GrammarError, Grammars, json_rule
from hybridmem.chat.sampling.token_bytes import TokenBytes
from hybridmem.chat.sampling.triggers import CallGrammar, Mark
from hybridmem.chat.tools.calls import CallFormat, Literals, Tool
from hybridmem.chat.tools.families import Habits
from hybridmem.chat.tools.harmony import MESSAGE, content_opening, thoughts_rule
from hybridmem.chat.tools.tool_schemas import arguments_rule, properties_of, required_of

MOST_GRAMMAR = 64 << 10
"""A schema, pattern or grammar may have this many characters."""


@dataclass(frozen=True)
class Shape:
    """Describes the form that the content of a reply must have.

    Attributes:
        kind: what `value` is. "json": a schema. "choice": texts. "regex": a pattern. "lark": a grammar.
        name: the parameter that asked for it, for errors.
    """

    kind: Literal["json", "choice", "regex", "lark"]
    value: Any
    name: str = "response_format"


@dataclass(frozen=True)
class Required:
    """Says that a reply must be calls of these tools.

    Attributes:
        format: how the calls are written.
        is_parallel: whether there may be several calls.
    """

    tools: Sequence[Tool]
    format: CallFormat
    is_parallel: bool


def make_grammar(
    grammars: Grammars, habits: Habits, shape: Shape | None, calls: Required | None, *, must_call: bool,
    is_thinking: bool,
) -> Grammar | None:  # fmt: skip
    """Return the grammar of a reply, or None if any text is allowed.

    Args:
        shape: the form of the reply's content. None: any form.
        calls: the calls that the reply may make instead. With `must_call` it must make them.
        is_thinking: whether the prompt ended with the mark that begins thoughts. If so, thoughts come first, as any
            text.
    Raises:
        GrammarError: something cannot be enforced. The message names it.
    """
    if shape is None and not must_call:
        return None
    if shape is not None and len(json.dumps(shape.value)) > MOST_GRAMMAR:
        raise GrammarError(f"it has more than {MOST_GRAMMAR:,} characters")
    if calls is None and not is_thinking and not habits.has_channels:
        assert shape is not None, "there is one of the two"
        return _alone(grammars, shape)

    literals = habits.literals
    bodies, rules = [], []
    if shape is not None and not must_call:
        bodies.append(f"{content_opening(literals)} content" if habits.has_channels else "content")
        rules.append(f"content: {_content(shape)}")
    if calls is not None:
        bodies.append("calls")
        rules.append(calls.format.rules(calls.tools, literals, is_parallel=calls.is_parallel))
    may_think = "thought? " if habits.has_channels else "thought " if is_thinking else ""
    start = f"start: {may_think}({' | '.join(bodies)})"
    if habits.has_channels:
        rules.append(thoughts_rule(literals))
    elif is_thinking:
        thoughts, how = literals.until(habits.thoughts.end)
        rules += [f"thought: thoughts gap\nthoughts{how}: {thoughts}", "gap: /\\n{0,2}/"]
    return grammars.lark("\n".join([start, *rules]))


def make_calls_grammar(
    grammars: Grammars, habits: Habits, calls: Required, tokens: TokenBytes, *, is_thinking: bool
) -> CallGrammar | None:
    """Return the grammar of the calls that a reply may make.

    None: calls have no mark, and do not begin the reply either.

    Raises:
        GrammarError: something cannot be enforced. The message names it.
    """
    begin, literals = calls.format.begun_by, habits.literals
    if not begin and not calls.format.is_bare:
        return None
    # Where each call has a mark of its own, the grammar ends with the call, and the next mark begins a new grammar.
    is_parallel = calls.is_parallel and calls.format.has_blocks
    rules = calls.format.rules(calls.tools, literals, is_parallel=is_parallel)
    mark, own = partial(_mark, literals), habits.thoughts
    # In channels, calls begin in headers: thoughts and contents are bodies of messages.
    around = (MESSAGE if habits.has_channels else own.begin, own.end)
    thoughts = (mark(around[0]), mark(around[1])) if habits.thinks else None
    return CallGrammar(
        grammars.lark(f"start: calls\n{rules}"), mark(begin) if begin else None, tokens, thoughts, is_thinking,
        is_single=not calls.is_parallel, thinks_anywhere=habits.has_channels,
    )  # fmt: skip


def with_enforced_schema(grammars: Grammars, tool: Tool) -> Tool:
    """Return a tool with the part of its schema that a grammar enforces: all, the names of its arguments, or nothing.

    Otherwise, one tool whose schema no grammar can enforce would leave the calls of all other tools unconstrained.
    """
    names = dict.fromkeys(properties_of(tool), True)
    named = {"type": "object", "properties": names, "required": [name for name in required_of(tool) if name in names]}
    for parameters in (tool.parameters, named):
        with suppress(GrammarError):
            tried = replace(tool, parameters=parameters)
            grammars.lark(f"start: {arguments_rule(tried)}")
            return tried
    return replace(tool, parameters={"type": "object"})


def _mark(literals: Literals, text: str) -> Mark:
    return Mark(text, literals.pieces(text))


def _alone(grammars: Grammars, shape: Shape) -> Grammar:
    read = {
        "json": grammars.json_schema, "choice": grammars.choice, "regex": grammars.regex, "lark": grammars.lark,
    }[shape.kind]  # fmt: skip
    return read(shape.value)


def _content(shape: Shape) -> str:
    """Return an expression for a form, as the right side of a rule."""
    if shape.kind == "json":
        return json_rule(shape.value if isinstance(shape.value, dict) else {})
    if shape.kind == "choice":
        return " | ".join(json.dumps(text) for text in shape.value)
    if shape.kind == "regex":
        return "/" + str(shape.value).replace("/", "\\/") + "/"
    return f"%lark {{\n{shape.value}\n}}"
