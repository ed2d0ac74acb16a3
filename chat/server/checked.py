"""Reads JSON bodies into checked objects, and explains errors in OpenAI's form."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from hybridmem.chat.server.bodies import has_more_values
from hybridmem.chat.server.errors import ApiError, clip
from hybridmem.chat.tools.calls import check_json

MOST_VALUES = 32_768
"""A body may have this many objects, arrays and keys. Python makes an object of each, while all other requests wait."""

_MAY_BE_INFINITE = re.compile(rb"[0-9][eE]\+?[0-9]{2}|[0-9]{300}")
"""Matches what may be a number that Python reads as infinite, such as 1e999."""

Neutral = dict[str, tuple[object, ...]]
ModelT = TypeVar("ModelT", bound="Checked")
ANY: tuple[object, ...] = ("any value",)
"""Marks a parameter that has no effect, whatever its value."""
LEFT_OUT = "left_out"
"""The field, of requests that have it, for what is accepted and not carried out."""


def read_request(model: type[ModelT], body: bytes) -> ModelT:
    """Read a request's body. Raises ApiError 400; the error names the parameter."""
    if has_more_values(body, model.most_values):
        message = (
            f"The body has more than {model.most_values:,} objects, arrays and keys; send fewer messages, or join "
            "their parts."
        )
        raise ApiError(400, message, code="invalid_json")
    try:
        value = from_json(body, allow_inf_nan=False)
        if _MAY_BE_INFINITE.search(body):
            check_json(value)
    except ValueError as error:
        raise ApiError(400, f"The body is no valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"The body must be a JSON object, not {_kind(value)}.", code="invalid_json")
    return model.read(value)


def _explain(detail: ErrorDetails) -> ApiError:
    kind, given = detail["type"], reprlib.repr(detail["input"])
    where = [*detail["loc"], *([detail["ctx"]["name"]] if kind in ("unknown", "unsupported", "absent") else [])]
    param = clip("".join(f"[{part}]" if isinstance(part, int) else f".{clip(part)}" for part in where).lstrip("."))
    if kind == "unknown":
        return ApiError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if kind in ("missing", "absent"):
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if kind == "unsupported":
        return ApiError(
            400, f"Unsupported parameter: '{param}' {detail['msg']}.", param=param, code="unsupported_parameter"
        )
    why = str(detail["ctx"]["error"]) if kind == "value_error" else detail["msg"]
    return ApiError(400, f"Invalid '{param}': {why}; got {given}.", param=param, code="invalid_value")


class Checked(BaseModel):
    """Reads a JSON object whose every field is known and has the right type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    neutral: ClassVar[Neutral] = {}
    """Parameters that are not supported -> their values without effect, beside null. `ANY`: no value has an effect. The
    entries of base classes count as well.
    """
    noted: ClassVar[Mapping[str, str]] = {}
    """Parameters that are harmless without being carried out -> what a reply says of it in "hybrid_memory", unless
    `neutral` lists the value. The entries of base classes count as well.
    """
    derived: ClassVar[tuple[str, ...]] = ()
    """Fields that follow from others. No client can set them."""
    most_values: ClassVar[int] = MOST_VALUES
    """A body may have this many objects, arrays and keys."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """The names that other servers use for parameters."""

    @classmethod
    def read(cls, value: dict[str, Any]) -> Self:
        """Read the fields of a request. Raises ApiError 400; the error names the parameter."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise _explain(error.errors(include_url=False)[0]) from None

    @classmethod
    @cache
    def all_neutral(cls) -> Neutral:
        return _joined(cls, "neutral")

    @classmethod
    @cache
    def all_noted(cls) -> Mapping[str, str]:
        return _joined(cls, "noted")

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        value = {name: given for name, given in cls._rename(value).items() if given is not None}
        neutral, noted = cls.all_neutral(), cls.all_noted()
        known = cls.model_fields.keys() - neutral.keys() - noted.keys() - {LEFT_OUT, *cls.derived}
        others = [name for name in value if name not in known]
        unknown = next((name for name in others if name not in neutral and name not in noted), None)
        # Report only the first unknown field. There may be very many, and each would cost an error of its own.
        if unknown is not None:
            raise PydanticCustomError("unknown", "is unknown", {"name": unknown})
        left_out = list[str]()
        for name in others:
            harmless = neutral.get(name, ())
            if harmless is ANY or _is_any_of(value[name], harmless):
                continue
            if name not in noted:
                rest = f"; leave it out, or give {' or '.join(map(repr, harmless))}" if harmless else "; leave it out"
                raise PydanticCustomError("unsupported", "is not supported here{rest}", {"name": name, "rest": rest})
            left_out.append(f"{name}: {noted[name]}")
        fields, also = cls.simplify({name: given for name, given in value.items() if name in known})
        left_out += also
        return fields | ({LEFT_OUT: tuple(left_out)} if left_out and LEFT_OUT in cls.model_fields else {})

    @classmethod
    def simplify(cls, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the fields in the forms that this class reads, and what was left out of them, with the reason.

        Subclasses extend this. Raises ApiError.
        """
        return fields, []

    @classmethod
    def _rename(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Replace alternative names of parameters by their main names.

        Two names of one parameter with different values are refused.
        """
        if cls.aliases.keys().isdisjoint(value):
            return value
        renamed = {name: given for name, given in value.items() if name not in cls.aliases}
        for alias, name in cls.aliases.items():
            if value.get(alias) is not None:
                if renamed.get(name) not in (None, value[alias]):
                    rest = f" beside '{name}', which is another name of it; leave one out"
                    raise PydanticCustomError("unsupported", "is not possible{rest}", {"name": alias, "rest": rest})
                renamed[name] = value[alias]
        return renamed


def _joined(cls: type[Checked], name: str) -> dict[str, Any]:
    """Return the merged entries of an attribute of a class and of its base classes. The class's own entries win."""
    return {key: value for base in reversed(cls.__mro__) for key, value in getattr(base, name, {}).items()}


def _is_any_of(given: object, values: tuple[object, ...]) -> bool:
    if isinstance(given, dict):  # Some clients write default values explicitly.
        given = {key: inner for key, inner in given.items() if inner is not None}
    return any(type(given) is type(value) and given == value for value in values)


def _kind(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
