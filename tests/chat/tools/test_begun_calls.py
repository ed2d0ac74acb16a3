"""A reply need not make a call. A call that it begins keeps to its schema, and the text around it is free."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hybridmem.chat.sampling.grammar import Grammars
from hybridmem.chat.sampling.sampler import Sampler
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.sampling.token_bytes import TokenBytes
from hybridmem.chat.tools.calls import Tool
from hybridmem.chat.tools.families import Habits
from hybridmem.chat.tools.grammars import Required, make_calls_grammar
from hybridmem.chat.tools.reading import make_reader
from tests.chat.family_templates import ALL, model
from tests.chat.tools.test_families import FORMAT, NOW, fits
from tests.chat.tools.test_tools import read
from tests.extent import few_cases

TOOLS = [FORMAT, NOW]


def begun(tokenizer: Any, habits: Habits, *, is_parallel: bool = True, is_thinking: bool = False) -> Any:
    grammars = Grammars(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    assert habits.calls is not None
    required = Required(TOOLS, habits.calls, is_parallel=is_parallel)
    return make_calls_grammar(grammars, habits, required, TokenBytes(tokenizer), is_thinking=is_thinking)


def new_sampler(tokenizer: Any, grammar: Any, seed: int = 0) -> Sampler:
    sampling = Sampling(temperature=1.0, seed=seed, length_decay=(20, 1.5))
    return Sampler(sampling, stop_ids=(tokenizer.eos_token_id,), trigger=grammar.watch())


def say(sampler: Sampler, tokenizer: Any, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    for token_id in ids:
        sampler.add(token_id)
    return list(ids)


def draw_call(sampler: Sampler, tokenizer: Any, seed: int) -> list[int]:
    """Draw tokens while the sampler is constrained."""
    generator, ids = torch.Generator().manual_seed(seed), list[int]()
    while sampler.matcher is not None and not sampler.is_stopped:
        ids.append(sampler.choose(torch.randn(len(tokenizer), generator=generator)))
        assert len(ids) < 8000
    return ids


@few_cases
@pytest.mark.parametrize("family", [family for family in ALL if family != "llama"])
def test_a_call_that_has_begun_fits_whatever_is_drawn(family: str) -> None:
    tokenizer, habits = model(family)
    grammar = begun(tokenizer, habits)
    assert habits.calls is not None
    opening = "<|channel|>commentary " if family == "gpt-oss" else "Sure, < <tool [TOOL.\n"
    for seed in range(2):
        sampler = new_sampler(tokenizer, grammar, seed)
        ids = say(sampler, tokenizer, opening)
        assert sampler.matcher is None, "nothing has begun"
        ids += say(sampler, tokenizer, habits.calls.begun_by)
        assert sampler.matcher is not None
        ids += draw_call(sampler, tokenizer, seed)
        assert sampler.matcher is None, "the reply is free again"
        content, _, calls = read(make_reader(habits, TOOLS, habits.calls), [tokenizer.decode(ids)])
        assert content.strip() == opening.strip() or family == "gpt-oss"
        assert calls and all(name == "now" or fits(arguments) for name, arguments in calls)


def test_a_second_call_is_constrained_too_unless_there_may_be_one_only() -> None:
    tokenizer, habits = model("hermes")
    sampler = new_sampler(tokenizer, begun(tokenizer, habits))
    for _ in range(2):
        say(sampler, tokenizer, "text <tool_call>")
        draw_call(sampler, tokenizer, 0)
    single = new_sampler(tokenizer, begun(tokenizer, habits, is_parallel=False))
    say(single, tokenizer, "<tool_call>")
    draw_call(single, tokenizer, 0)
    assert single.is_stopped and not sampler.is_stopped


@pytest.mark.parametrize("is_thinking", [True, False])
def test_calls_in_thoughts_are_free(is_thinking: bool) -> None:
    tokenizer, habits = model("hermes")
    sampler = new_sampler(tokenizer, begun(tokenizer, habits, is_thinking=is_thinking))
    say(sampler, tokenizer, ("" if is_thinking else "\n<think>") + "I could <tool_call>")
    assert sampler.matcher is None
    say(sampler, tokenizer, "</think>")
    twin = sampler.__copy__()
    say(twin, tokenizer, "<tool_call>")
    assert twin.matcher is not None and sampler.matcher is None, "a copy goes its own way"


def test_a_mark_of_letters_may_end_inside_of_a_token() -> None:
    """Some vocabularies have one token for the mark's last character and the line break after it."""
    tokenizer, habits = model("functionary")
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    grammar = begun(tokenizer, habits)
    pieces = {1: b"<func", 2: b"tion=n"}
    ids = tokenizer.encode("now")

    class Tokens:
        def of(self, token_id: int) -> bytes:
            return pieces.get(token_id, b"")

    trigger = grammar.__class__(grammar.grammar, grammar.begin, Tokens(), grammar.thoughts).watch()
    assert trigger.add(1) is None
    matcher = trigger.add(2)
    assert matcher is not None and matcher.count_allowed(ids[1:]) == 2, "the first letter of the name is there"
    assert grammar.__class__(grammar.grammar, grammar.begin, Tokens(), grammar.thoughts).watch().add(2) is None


def test_a_call_without_a_mark_is_free_until_it_is_taken_back() -> None:
    tokenizer, habits = model("llama")
    sampler = new_sampler(tokenizer, begun(tokenizer, habits))
    say(sampler, tokenizer, '{"name": "now", "parameters": {')
    assert sampler.matcher is None
    sampler.begin_call()
    assert sampler.matcher is not None


def test_no_argument_is_invented_and_what_no_grammar_enforces_is_left_out() -> None:
    tokenizer, habits = model("hermes")
    odd = Tool("now", {
        "type": "object", "propertyNames": {"pattern": "^a"}, "minProperties": 0,
        "properties": {
            "a": {"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"type": "integer", "not": {}}},
            "b": {"oneOf": [{"type": "null"}, {"type": "object", "properties": {}, "if": {}, "then": {}}]},
            "c": {"type": "string", "format": "colour", "pattern": "^(?=a)", "maxLength": 1},
            "d": {"type": "object", "additionalProperties": True, "properties": {}, "maxProperties": 1},
        },
        "required": ["a", "b", "c"],
    })  # fmt: skip
    grammars = Grammars(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    assert habits.calls is not None
    required = Required([odd], habits.calls, is_parallel=False)
    grammar = make_calls_grammar(grammars, habits, required, TokenBytes(tokenizer), is_thinking=False)
    for seed in range(4):
        sampler = new_sampler(tokenizer, grammar, seed)
        ids = say(sampler, tokenizer, "<tool_call>") + draw_call(sampler, tokenizer, seed)
        text = tokenizer.decode(ids).removeprefix("<tool_call>").partition("</tool_call>")[0]
        arguments = json.loads(text)["arguments"]
        assert arguments.keys() <= {"a", "b", "c", "d"} and arguments["b"] in (None, {})
