"""Reads and writes workloads as JSONL files, with one event on each line, in the order of their times.

Fields are those of `chat.simulation.workload.Event`.

{"at": 0.0, "user": "anna", "action": "arrive", "opening": [{"role": "system", "content": "Be brief."}]}
{"at": 1.5, "user": "anna", "action": "say", "text": "My cat is called Milo.", "value": "Milo"}
{"at": 4.0, "user": "anna", "action": "edit", "turn": 0, "text": "My cat is called Luna.", "value": "Luna"}
{"at": 6.0, "user": "anna", "action": "branch", "into": "anna 2"}
{"at": 9.0, "user": "anna", "action": "say", "n_tokens": 40, "n_reply": 120}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridmem.chat.simulation.workload import ACTIONS, Event, Family, Workload
from hybridmem.memory import FormatError
from hybridmem.memory.blocks import is_integer


def write_trace(path: Path, workload: Workload) -> None:
    """Write all events in the order of their times, each without its empty fields. Raises OSError."""
    events = sorted((event for family in workload for event in family), key=lambda event: event.at)
    with path.open("w", encoding="utf-8") as file:
        for event in events:
            file.write(json.dumps(_as_fields(event), ensure_ascii=False) + "\n")


def _as_fields(event: Event) -> dict[str, Any]:
    fields = {
        name: value for name, value in asdict(event).items() if value is not None and value is not False and value != ()
    }
    if event.opening:
        fields["opening"] = [{"role": role, "content": content} for role, content in event.opening]
    return fields


def read_trace(path: Path) -> list[Family]:
    """Read the families of a trace, in the order in which they arrive.

    Raises:
        FormatError: something is not an event, or the user cannot do it at that time. The message names the line and
            the field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} cannot be read ({error}); give a JSONL file with one event a line") from error
    families: dict[str, Family] = {}
    users: dict[str, _User] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = _read_event(line)
            _follow(users, event)
        except _FieldError as error:
            raise FormatError(f"{path}, line {number}, {error}") from None
        families.setdefault(users[event.user].family, []).append(event)
    if not families:
        raise FormatError(f"{path} has no events; give a JSONL file with one event a line")
    return list(families.values())


class _FieldError(Exception):
    """Says what is wrong with a field of a line."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"field {field!r} is {value!r}; {remedy}")


# The functions below are about single lines.


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_count(value: object) -> bool:
    return is_integer(value, 1)


def _is_index(value: object) -> bool:
    return is_integer(value, 0)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and set(m) == {"role", "content"} and all(isinstance(x, str) for x in m.values())
        for m in value
    )


_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "at": (_is_time, "give seconds from the start, 0 or more"),
    "user": (_is_name, "give a name"),
    "action": (lambda value: value in ACTIONS, f"choose one of {', '.join(ACTIONS)}"),
    "text": (_is_name, "give what is said"),
    "n_tokens": (_is_count, "give a number of tokens, 1 or more"),
    "n_reply": (_is_count, "give a number of tokens, 1 or more"),
    "reply": (_is_text, "give the reply that is right"),
    "asks": (lambda value: isinstance(value, bool), "give true or false"),
    "value": (_is_name, "give the word that the message tells or the answer names"),
    "turn": (_is_index, "give the number of a message, from 0"),
    "into": (_is_name, "give the new conversation a name"),
    "opening": (_are_messages, 'give a list of {"role": ..., "content": ...}'),
}
_ALLOWED: dict[str, set[str]] = {
    "arrive": {"opening", "n_tokens"},
    "say": {"text", "n_tokens", "n_reply", "reply", "asks", "value"},
    "edit": {"text", "n_tokens", "n_reply", "reply", "asks", "value", "turn"},
    "branch": {"into"},
}
_ALWAYS = {"at", "user", "action"}


def _read_event(line: str) -> Event:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _FieldError("(all)", line[:40], f"it is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _FieldError("(all)", fields, "give a JSON object")
    for name, value in fields.items():
        if name not in _FIELDS:
            raise _FieldError(name, value, f"there is no such field; there are {', '.join(_FIELDS)}")
        if not _FIELDS[name][0](value):
            raise _FieldError(name, value, _FIELDS[name][1])
    for name in sorted(_ALWAYS):
        if name not in fields:
            raise _FieldError(name, None, _FIELDS[name][1])
    action = fields["action"]
    for name in fields:
        if name not in _ALWAYS | _ALLOWED.get(action, set()):
            raise _FieldError(name, fields[name], f"{action!r} has no such field; leave it out")
    _check_needed(action, fields)
    if "opening" in fields:
        fields["opening"] = tuple((m["role"], m["content"]) for m in fields["opening"])
    return Event(**fields)


def _check_needed(action: str, fields: dict[str, Any]) -> None:
    """Raise _FieldError if an action lacks a field that it needs."""
    if action in ("say", "edit") and ("text" in fields) == ("n_tokens" in fields):
        raise _FieldError("text", fields.get("text"), f"{action!r} needs either text or n_tokens")
    for name, needed_by in (("turn", "edit"), ("into", "branch")):
        if action == needed_by and name not in fields:
            raise _FieldError(name, None, _FIELDS[name][1])
    if fields.get("asks") and "reply" not in fields:
        raise _FieldError("asks", True, "give the reply that is right as well")
    if action == "arrive" and "n_tokens" in fields and not fields.get("opening"):
        raise _FieldError("n_tokens", fields["n_tokens"], "give the opening that it makes up as well")


# The classes and functions below are about users.


@dataclass
class _User:
    """Holds what a trace has said about a user so far. `family` is the user from whose conversation this one grew."""

    family: str
    at: float
    n_turns: int = 0
    is_gone: bool = False


def _follow(users: dict[str, _User], event: Event) -> None:
    """Apply an event. Raises _FieldError if its user cannot do that at this time."""
    user = users.get(event.user)
    if event.action == "arrive":
        if user is not None:
            raise _FieldError("user", event.user, "this user is there already; give each their own name")
        users[event.user] = _User(event.user, event.at)
        return
    if user is None or user.is_gone:
        raise _FieldError("user", event.user, 'this user is not there; begin with "arrive", and end with "leave"')
    if event.at < user.at:
        raise _FieldError(
            "at", event.at, f"the same user's event before is later, at {user.at}; sort the events by time"
        )
    user.at = event.at
    if event.action == "say":
        user.n_turns += 1
    elif event.action == "edit":
        if event.turn is None or event.turn >= user.n_turns:
            raise _FieldError("turn", event.turn, f"{event.user!r} has {user.n_turns} messages then, counted from 0")
        user.n_turns = event.turn + 1
    elif event.action == "regenerate" and not user.n_turns:
        raise _FieldError(
            "action", event.action, f"{event.user!r} has said nothing yet that a reply could be regenerated for"
        )
    elif event.action == "branch" and event.into is not None:
        if event.into in users:
            raise _FieldError("into", event.into, "this user is there already; give each their own name")
        users[event.into] = _User(user.family, event.at, user.n_turns)
    elif event.action == "leave":
        user.is_gone = True
