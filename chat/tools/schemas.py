"""Says which types a JSON Schema allows, and turns the text of an argument into a value of one of them."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hybridmem.chat.tools.calls import check_json, parse_json

_MOST_DEPTH = 32
"""References are followed this deep. A schema may refer to itself."""
_BOUNDS = {"pattern", "format", "minLength", "maxLength"}
"""The keywords that say which strings are allowed."""
_HINTS = (
    ("string", {"pattern", "minLength", "maxLength"}),
    ("object", {"properties", "required", "additionalProperties", "patternProperties"}),
    ("array", {"items", "prefixItems", "minItems", "maxItems"}),
    ("number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
)
"""The type that a schema without one is meant to have -> keywords that only that type has."""
_IN_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Allowed:
    """Says what a schema allows.

    Attributes:
        types: the names of the types. None: all of them.
        literals: the only values that are allowed. None: there is no such list.
        is_free: whether any string at all is allowed.
    """

    types: frozenset[str] | None
    literals: tuple[Any, ...] | None = None
    is_free: bool = False

    @property
    def is_text(self) -> bool:
        """Return whether a value is written as plain text without quotation marks."""
        return self.is_free and self.types is not None


ANYTHING = Allowed(None)


def allowed_by(schema: object, root: object) -> Allowed:
    """Return what a schema allows.

    Args:
        root: the schema in which references are looked up.
    """
    return _allowed(schema, root, _MOST_DEPTH)


def _allowed(schema: object, root: object, depth: int) -> Allowed:
    if not isinstance(schema, dict) or depth == 0:
        return ANYTHING
    found = [_own(schema)]
    if isinstance(reference := schema.get("$ref"), str):
        found.append(_allowed(resolve(reference, root), root, depth - 1))
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list) and parts:
            found.append(_either(_allowed(part, root, depth - 1) for part in parts))
    if isinstance(parts := schema.get("allOf"), list):
        found += [_allowed(part, root, depth - 1) for part in parts]
    return _all_of(found)


def longest_text(schema: object, root: object) -> int | None:
    """Return the greatest length of a text, if the schema limits nothing else of it.

    None: it limits something else, or nothing.
    """
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        schema = resolve(schema["$ref"], root)
    if not isinstance(schema, dict) or schema.get("type") != "string":
        return None
    most = schema.get("maxLength")
    is_alone = not schema.keys() & {"enum", "const", "pattern", "format", "minLength", "anyOf", "oneOf", "allOf"}
    return most if is_alone and type(most) is int and 0 <= most <= 10_000 else None


def resolve(reference: str, root: object) -> object:
    """Return the part of a schema to which a reference points, such as "#/$defs/Name". None: there is none."""
    if not reference.startswith("#"):
        return None
    found = root
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _own(schema: dict[str, Any]) -> Allowed:
    """Return what a schema's own keywords allow, without those that combine other schemas."""
    literals = schema.get("enum") if isinstance(schema.get("enum"), list) else None
    if "const" in schema:
        literals = [schema["const"]]
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else kind
    if isinstance(kinds, list) and kinds:
        types = frozenset(each for each in kinds if isinstance(each, str))
    elif literals is not None:
        types = frozenset(map(type_of, literals))
    else:
        types = next((frozenset({hint}) for hint, names in _HINTS if schema.keys() & names), frozenset())
    if literals is not None:
        return Allowed(types or None, tuple(literals))
    return Allowed(types or None, None, is_free=(not types or "string" in types) and not schema.keys() & _BOUNDS)


def type_of(value: object) -> str:
    """Return JSON Schema's name for the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for name, kind in (("integer", int), ("number", float), ("string", str), ("array", list)):
        if isinstance(value, kind):
            return name
    return "object"


def _either(parts: Iterable[Allowed]) -> Allowed:
    parts = list(parts)
    types = [part.types for part in parts]
    literals = [part.literals for part in parts]
    return Allowed(
        None if None in types else frozenset().union(*types),  # type: ignore[arg-type]
        None if None in literals else tuple(value for each in literals for value in each or ()),
        any(part.is_free for part in parts),
    )


def _all_of(parts: list[Allowed]) -> Allowed:
    types = [part.types for part in parts if part.types is not None]
    literals = next((part.literals for part in parts if part.literals is not None), None)
    common = frozenset.intersection(*map(_with_integers, types)) if types else None
    return Allowed(common, literals, all(part.is_free for part in parts))


def _with_integers(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types


def value_of(text: str, schema: object, root: object) -> Any:
    """Return the value that a text means by its schema.

    If the text fits no type of the schema, or if the schema allows any string, it stays text.
    """
    allowed = allowed_by(schema, root)
    readings = list(_readings(text, allowed))
    if allowed.literals is not None:
        for reading in [text, *readings]:
            if any(type(reading) is type(each) and reading == each for each in allowed.literals):
                return reading
    for reading in readings:
        if (fitting := _as_allowed(reading, allowed)) is not None:
            return fitting[0]
    if allowed.types is not None and "string" in allowed.types:
        return text
    return readings[0] if readings else text


def _readings(text: str, allowed: Allowed) -> Iterator[Any]:
    """Yield the value of a text as JSON, and as a literal of Python if its schema does not allow text."""
    try:
        yield parse_json(text)
        return
    except ValueError:
        pass
    word = text.strip()
    if allowed.types is not None and word in _IN_PYTHON:
        yield json.loads(_IN_PYTHON[word])
    elif allowed.types is not None and allowed.types & {"array", "object"}:
        try:
            yield literal_of(word)
        except ValueError:
            return


def _as_allowed(value: object, allowed: Allowed) -> tuple[Any] | None:
    """Return a value, converted to a type that its schema allows. None: the schema allows no such type."""
    kind = type_of(value)
    if allowed.types is None:
        return (value,)
    # Free strings are written without quotation marks, so these quotation marks belong to the string.
    if kind == "string":
        return (value,) if "string" in allowed.types and not allowed.is_free else None
    if kind in allowed.types or (kind == "integer" and "number" in allowed.types):
        return (value,)
    if isinstance(value, float) and value.is_integer() and "integer" in allowed.types:
        return (int(value),)
    return None


def literal_of(text: str) -> Any:
    """Return the value of a literal of Python or of JSON. Raises ValueError for anything else."""
    try:
        value = _literal(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, TypeError):
        raise ValueError("it is no literal") from None
    value = _with_whole_characters(value)
    check_json(value)
    return value


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _IN_PYTHON.values():
        return json.loads(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("it is no literal")
        return {_key(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("JSON has no such value")
    return value


def _key(node: ast.expr) -> str:
    key = _literal(node)
    return key if isinstance(key, str) else json.dumps(key)


def _with_whole_characters(value: Any) -> Any:
    """Join the surrogate pairs that JSON writes for some characters, and that Python reads as two characters."""
    if isinstance(value, str) and not value.isascii():
        try:
            return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            return value  # This is half of a pair, which `check_json` refuses.
    if isinstance(value, list):
        return [_with_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_with_whole_characters(key): _with_whole_characters(item) for key, item in value.items()}
    return value
