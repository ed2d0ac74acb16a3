"""The tests say what grammars allow, and which are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.sampling.grammar import GrammarError, Grammars
from hybridmem.chat.sampling.sampler import Sampler
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.memory import BatchError


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))


def allows(grammars: Grammars, schema: dict[str, Any], value: object, tokenizer: Tokenizer) -> bool:
    matcher = grammars.json_schema(schema).matcher()
    ids = tokenizer.encode(json.dumps(value))
    if matcher.count_allowed(ids) < len(ids):
        return False
    for token_id in ids:
        matcher.add(token_id)
    return matcher.is_accepting


@pytest.mark.parametrize(
    ("day", "exists"),
    [
        ("2024-02-29", True), ("2023-02-29", False), ("1900-02-29", False), ("2000-02-29", True), ("2023-04-31", False),
        ("2023-12-31", True), ("0000-01-01", False), ("2023-00-10", False),
    ],
)  # fmt: skip
def test_days_are_those_of_the_calendar(grammars: Grammars, tokenizer: Tokenizer, day: str, exists: bool) -> None:
    assert allows(grammars, {"type": "string", "format": "date"}, day, tokenizer) == exists
    assert allows(grammars, {"type": "string", "format": "date-time"}, f"{day}T10:00:00Z", tokenizer) == exists


def test_a_property_that_is_called_format_is_no_format(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"format": {"const": {"format": "date"}}}, "required": ["format"]}
    assert allows(grammars, schema, {"format": {"format": "date"}}, tokenizer)


@pytest.mark.parametrize(
    "keyword",
    [
        {"not": {"type": "null"}}, {"if": {}, "then": {}}, {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {}}, {"type": "object", "propertyNames": {}},
        {"type": "object", "dependentRequired": {"a": ["b"]}}, {"type": "object", "unevaluatedProperties": False},
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_named(grammars: Grammars, keyword: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match=f'cannot be enforced: .*"{[*keyword][-1]}"'):
        grammars.json_schema(keyword)


@pytest.mark.parametrize(
    "grammar",
    [
        {"const": -(2**63)}, {"enum": ["a", {"minimum": [1 - 2**63]}]}, {"type": "integer", "maximum": -1e300},
        {"properties": {"maximum": {"allOf": [{"exclusiveMaximum": -(2**63)}]}}},
        'start: "a" %json {"const": 1} | %json\n {"enum": [-9223372036854775808]}',
        'start: %json // "x"\n {"const": -9223372036854775808}',
    ],
)  # fmt: skip
def test_numbers_that_would_end_the_process_are_refused(grammars: Grammars, grammar: Any) -> None:
    with pytest.raises(GrammarError, match=r"the number -.* is too small to be enforced; give one of at least -46"):
        (grammars.lark if isinstance(grammar, str) else grammars.json_schema)(grammar)


def test_large_numbers_are_enforced(grammars: Grammars, tokenizer: Tokenizer) -> None:
    low = {"type": "integer", "minimum": -(2**62), "maximum": 2**53, "default": -(2**63)}
    for schema in (low, {"const": -(2**62)}):
        assert grammars.json_schema(schema).matcher().count_allowed(tokenizer.encode(str(-(2**62)))) > 0
    assert grammars.choice(["%json -1", "b"]).matcher().count_allowed(tokenizer.encode("%json"))


def test_a_schema_of_any_depth_is_enforced_or_refused(grammars: Grammars) -> None:
    schema: Any = {"type": "null"}
    for _ in range(900):
        schema = {"anyOf": [schema]}
    with pytest.raises(GrammarError, match="nested too deeply"):
        grammars.json_schema(schema)


def test_a_grammar_that_leads_nowhere_is_its_clients_error(grammars: Grammars, tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarError, match=r"nothing can follow, not even the end$"):
        grammars.json_schema({"$ref": "#"})
    matcher = grammars.json_schema({"type": "array", "items": {"$ref": "#/items"}, "minItems": 1}).matcher()
    sampler = Sampler(Sampling(), matcher=matcher)
    sampler.add(tokenizer.encode("[")[0])
    with pytest.raises(BatchError, match="nothing can follow"):
        sampler.choose(torch.zeros(len(tokenizer)))


def test_a_matcher_goes_on_for_itself(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.regex("ab").matcher()
    ids = [tokenizer.encode(sign)[0] for sign in "ab"]
    ahead = matcher.copy()
    ahead.add(ids[0])
    ahead.add(ids[1])
    assert ahead.is_stopped and not matcher.is_accepting and matcher.count_allowed(ids) == 2


@pytest.mark.parametrize("form", [{}, {"format": "email"}, {"format": "uri"}, {"pattern": "[0-9]{2}"}])
def test_what_closes_a_reply_ends_it_soon(grammars: Grammars, tokenizer: Tokenizer, form: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"to": {"type": "string"} | form}, "required": ["to"]}
    matcher, ids = grammars.json_schema(schema).matcher(), tokenizer.encode('{"to": "bbb')
    assert matcher.count_allowed(ids) == len(ids)
    for token_id in ids:
        matcher.add(token_id)
    for _ in range(6):
        if not matcher.is_accepting:
            matcher.add(matcher.closing_ids()[0])
    assert matcher.closing_ids() == [tokenizer.eos_token_id]
