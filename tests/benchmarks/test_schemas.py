"""In a sample of the schemas of `python -m benchmarks schemas`, every finished reply is valid."""

from __future__ import annotations

import jsonschema

from benchmarks.schema_generator import make_schemas
from benchmarks.schemas import Parts, is_valid, write_all
from tests.extent import only_in_long


@only_in_long
def test_what_is_finished_is_valid() -> None:
    schemas = [schema for _, schema in make_schemas(20, seed=7)]
    written = write_all(Parts.load(), schemas)
    finished = 0
    for schema, reply in zip(schemas, written, strict=True):
        assert not isinstance(reply, str), f"refused: {reply}"
        assert reply.finish_reason in ("stop", "length"), reply.error
        if reply.finish_reason == "stop":
            finished += 1
            assert is_valid(reply.text, schema), (schema, reply.text)
    assert finished >= 15


@only_in_long
def test_there_are_a_thousand_and_all_are_schemas() -> None:
    cases = make_schemas(1000)
    assert len(cases) == 1000 and sum(not family.startswith("generated") for family, _ in cases) >= 100
    assert len({repr(schema) for _, schema in cases}) > 950
    for _, schema in cases:
        jsonschema.Draft202012Validator.check_schema(schema)
