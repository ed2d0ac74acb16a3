"""Makes dates and times in schemas exact: llguidance allows 29 February in each year, and second 60 at any time."""

from __future__ import annotations

from typing import Any

_LEAP = "(0[48]|[2468][048]|[13579][26])"
_DAYS = "(02-(0[1-9]|1[0-9]|2[0-8])|(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30))"
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
DATE = f"({_YEAR}-{_DAYS}|([0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
"""A pattern for a day of the Gregorian calendar, in the years 1 to 9999."""
_TIME = r"[0-2][0-9]:[0-5][0-9]:[0-5][0-9]"
_PATTERNS = {"date": f"^{DATE}$", "date-time": f"^{DATE}[Tt]{_TIME}", "time": f"^{_TIME}"}
DATA = {"const", "enum", "default", "examples"}
"""The keywords whose values are data, not schemas."""


def with_exact_dates(schema: Any) -> Any:
    """Return a schema in which strings with the format of a date or a time also have a pattern."""
    if isinstance(schema, list):
        return [with_exact_dates(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    exact = {name: part if name in DATA else with_exact_dates(part) for name, part in schema.items()}
    kind = schema.get("format")
    if isinstance(kind, str) and kind in _PATTERNS and "pattern" not in schema:
        exact["pattern"] = _PATTERNS[kind]
    return exact
