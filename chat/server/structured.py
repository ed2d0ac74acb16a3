"""Reads the form that a reply must have, from `response_format` or from the fields of vLLM and llama.cpp."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from hybridmem.chat.server.checked import Checked, Neutral
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.tools.calls import parse_json
from hybridmem.chat.tools.grammars import Shape

_KINDS = "text, json_object, json_schema, regex, grammar"


def read_format(value: object) -> object:
    """Read OpenAI's `response_format`. The kinds "regex" and "grammar" are additions."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ValueError("it must be an object with a 'type', such as {'type': 'json_object'}")
    kind, rest = value["type"], {name: v for name, v in value.items() if name != "type" and v is not None}
    if kind == "text" and not rest:
        return None
    if kind == "json_object":
        return Shape("json", _read_schema(rest.get("schema", {"type": "object"})))
    if kind == "json_schema":
        named = rest.get("json_schema", rest)  # In Responses, these fields stand beside the type.
        if not isinstance(named, dict) or "schema" not in named:
            raise ValueError("a 'json_schema' has a name and a schema, such as {'name': 'answer', 'schema': {...}}")
        if unknown := sorted(named.keys() - {"name", "schema", "strict", "description"}):
            raise ValueError(f"{unknown[0][:40]!r} is no field of a json_schema")
        return Shape("json", _read_schema(named["schema"]))
    field = {"regex": "pattern", "grammar": "grammar"}.get(kind)
    if field is None:
        raise ValueError(f"its type must be one of {_KINDS}, not {kind[:40]!r}")
    if not isinstance(rest.get(field), str) or not rest[field]:
        raise ValueError(f"the type {kind!r} has a string as its {field!r}")
    return Shape("regex" if kind == "regex" else "lark", rest[field])


def _read_schema(value: object) -> Any:
    """Read a schema, which some clients send as text."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise ValueError(f"the schema is no valid JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise ValueError("a schema is an object, such as {'type': 'object'}")
    return value


def _read_choice(value: object) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise ValueError("it must be a list of texts")
    return value


Schema = Annotated[dict[str, Any] | bool, BeforeValidator(_read_schema)]
Choices = Annotated[list[str], BeforeValidator(_read_choice)]
Text = Annotated[str, Field(min_length=1)]


class StructuredOutputs(Checked):
    """Holds vLLM's object for the form of a reply. Exactly one of its fields is given."""

    neutral: ClassVar[Neutral] = {"disable_fallback": (False,), "disable_any_whitespace": (False,)}
    aliases: ClassVar[dict[str, str]] = {"json": "json_"}
    json_: Schema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class StructuredFields(Checked):
    """Holds the fields that ask for the form of a reply."""

    response_format: Annotated[Shape | None, BeforeValidator(read_format)] = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    json_schema: Schema | None = None
    grammar: Text | None = None

    @property
    def shape(self) -> Shape | None:
        return next(iter(self._shapes()), None)

    def _shapes(self) -> list[Shape]:
        kinds = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "lark"}
        found = [self.response_format] if self.response_format is not None else []
        named = {f"guided_{name}": (getattr(self, f"guided_{name}"), kind) for name, kind in kinds.items()}
        named |= {"json_schema": (self.json_schema, "json"), "grammar": (self.grammar, "lark")}
        if (inner := self.structured_outputs) is not None:
            named |= {
                f"structured_outputs.{name}": (getattr(inner, "json_" if name == "json" else name), kind)
                for name, kind in kinds.items()
            }
            named["structured_outputs.json_object"] = ({"type": "object"} if inner.json_object else None, "json")
        return [*found, *(Shape(kind, value, name) for name, (value, kind) in named.items() if value is not None)]  # type: ignore[arg-type]

    @model_validator(mode="after")
    def check_shape(self) -> StructuredFields:
        shapes = self._shapes()
        if len(shapes) > 1:
            message = f"'{shapes[0].name}' and '{shapes[1].name}' both say what form the reply has; leave out one."
            raise ApiError(400, message, param=shapes[1].name, code="invalid_value")
        return self
