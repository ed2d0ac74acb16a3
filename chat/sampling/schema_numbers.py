"""Finds numbers in schemas that make llguidance overflow its stack, which would end the process."""

from __future__ import annotations

import json
import re
from typing import Any

from hybridmem.chat.sampling.dates import DATA

LEAST = -(2**62)
"""The cause are integers that must be near -2**63, or below a number there. The limit excludes half of the range, which
nobody needs.
"""
_LOWER = {"minimum", "exclusiveMinimum", "default", "examples"}
"""The keywords whose numbers do no harm. A range may begin as low as it likes."""
_JSON = "%json"
_SUSPECT = re.compile(r"-\s*[0-9.]{19,}|-\s*[0-9.]+[eE]\+?[0-9]{2,}")


def find_too_small(schema: Any, *, is_data: bool = False) -> int | float | None:
    """Return a number in a schema that is below `LEAST` and cannot be enforced, or None.

    Args:
        is_data: whether `schema` is a value that a reply may have, and not a schema.
    """
    if isinstance(schema, dict):
        parts = [
            (part, is_data or name in DATA) for name, part in schema.items()
            if is_data or name not in _LOWER or isinstance(part, dict)
        ]  # fmt: skip
    elif isinstance(schema, list):
        parts = [(part, is_data) for part in schema]
    else:
        is_number = isinstance(schema, int | float) and not isinstance(schema, bool)
        return schema if is_number and schema < LEAST else None
    found = (find_too_small(part, is_data=of_data) for part, of_data in parts)
    return next((number for number in found if number is not None), None)


def find_in_grammar(grammar: str) -> int | float | str | None:
    """Return a number that is too small from a schema after %json in a Lark grammar, or None.

    If no schema can be read after %json, as in a text that only mentions the word, everything that looks like such a
    number counts.
    """
    at = grammar.find(_JSON)
    while at >= 0:
        text = grammar[at + len(_JSON) :].lstrip()
        try:
            schema, n_read = json.JSONDecoder().raw_decode(text)
        except ValueError:
            schema, n_read = {}, 0
            if suspect := _SUSPECT.search(text):
                return suspect.group()
        if (number := find_too_small(schema)) is not None:
            return number
        at = grammar.find(_JSON, len(grammar) - len(text) + n_read)
    return None
