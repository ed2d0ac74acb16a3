"""Arguments that are written as text get the types of their schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybridmem.chat.tools.calls import Tool
from hybridmem.chat.tools.schemas import value_of
from hybridmem.chat.tools.xml_calls import XmlCalls

TEXT = {"type": "string"}
OPTIONAL_TEXTS: list[dict[str, Any]] = [
    {"anyOf": [TEXT, {"type": "null"}], "default": None}, {"oneOf": [{"type": "null"}, TEXT]},
    {"type": ["string", "null"]}, {"$ref": "#/$defs/Maybe"}, {"allOf": [{"$ref": "#/$defs/Maybe"}]},
]  # fmt: skip
SHORT = {"type": "string", "maxLength": 9}
TRUTH, LIST, OBJECT = {"type": "boolean"}, {"type": "array", "items": TEXT}, {"type": "object"}
WHOLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
ROOT = {
    "$defs": {"Name": TEXT, "Maybe": {"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]}, "Loop": {"$ref": "#"}}
}
MEANT: list[tuple[dict[str, Any], str, Any]] = [
    (TEXT, "02134", "02134"), (TEXT, "null", "null"), (TEXT, '"a"', '"a"'), (TEXT, " a\n", " a\n"), (TEXT, "", ""),
    ({"$ref": "#/$defs/Name"}, "123", "123"), ({"minLength": 1}, "123", "123"),
    ({"enum": ["1", "2"]}, "1", "1"), ({"const": "true"}, "true", "true"), ({"enum": [1, 2]}, "2", 2),
    ({"enum": ["a", None]}, "null", None), ({"type": "string", "enum": ["1"]}, '"1"', "1"),
    (SHORT, "123", "123"), (SHORT, '"a"', "a"), ({"type": "string", "format": "date"}, "2026-01-15", "2026-01-15"),
    (TRUTH, "True", True), (TRUTH, "false", False), ({"anyOf": [TRUTH, {"type": "null"}]}, "None", None),
    (WHOLE, " 5 ", 5), (WHOLE, "5.0", 5), (WHOLE, "None", None), (WHOLE, "2026-01-15", "2026-01-15"),
    ({"type": "number"}, "5", 5), ({"type": "number"}, "1e3", 1000.0), ({"maximum": 9}, "5.5", 5.5),
    (LIST, '["a"]', ["a"]), (LIST, "['a', 'b']", ["a", "b"]), ({"anyOf": [LIST, {"type": "null"}]}, "['a']", ["a"]),
    (OBJECT, "{'a': True, 1: (None,)}", {"a": True, "1": [None]}), (OBJECT, "{'a': 1e999}", "{'a': 1e999}"),
    (OBJECT, "{'a': b'c'}", "{'a': b'c'}"), (OBJECT, "{" * 9, "{" * 9),
    ({"properties": {}}, "{'a': null}", {"a": None}),
    ({"anyOf": [TEXT, {"type": "integer"}]}, "abc", "abc"), ({"anyOf": [TEXT, {"type": "integer"}]}, "12", 12),
    ({"anyOf": [TEXT, LIST]}, '["a"]', ["a"]), ({}, "abc", "abc"), ({}, "12", 12), ({"$ref": "#/none"}, "12", 12),
    ({"$ref": "#/$defs/Loop"}, "a", "a"),
    (LIST, "['\\ud83c\\udf38']", ["🌸"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "meant"), MEANT)
def test_a_text_means_a_value_of_its_schema(schema: dict[str, Any], text: str, meant: Any) -> None:
    value = value_of(text, schema, ROOT)
    assert (value, type(value)) == (meant, type(meant))


@pytest.mark.parametrize("schema", OPTIONAL_TEXTS)
def test_an_optional_text_is_text_unless_it_is_null(schema: dict[str, Any]) -> None:
    for text in ("123", "1.10", "true", '{"a": 1}', '"a"', "None"):
        assert value_of(text, schema, ROOT) == (None if text == "None" else text)
    assert value_of("null", schema, ROOT) is None


def test_arguments_of_a_call_have_the_types_of_their_tool() -> None:
    tool = Tool("f", {"type": "object", "properties": {"a": {"$ref": "#/$defs/Maybe"}, "b": WHOLE}, **ROOT})
    block = XmlCalls().open([tool])
    block.feed("\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n12\n</parameter>\n</function>\n")
    (call,) = block.close() or []
    assert json.loads(call.arguments) == {"a": "12", "b": 12}
