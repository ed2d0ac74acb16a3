"""A workload is a function of its seed, in order, and the same after it was written and read."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hybridmem.chat.simulation.traces import read_trace, write_trace
from hybridmem.chat.simulation.workload import Habits, make_workload
from hybridmem.memory import FormatError, SpecError

LIVELY = Habits(n_users=12, turns=4, rate=20, edits=0.2, regenerations=0.15, branches=0.2, pauses=0.3, n_openings=2)


def test_a_workload_can_be_walked_twice_and_is_in_order() -> None:
    families = list(make_workload(LIVELY, 7))
    assert families == list(make_workload(LIVELY, 7)) != list(make_workload(LIVELY, 8))
    assert [family[0].at for family in families] == sorted(family[0].at for family in families)
    for family in families:
        assert [event.at for event in family] == sorted(event.at for event in family)
        assert family[0].action == "arrive" and family[-1].action == "leave"


def test_users_who_arrive_together_tell_different_names() -> None:
    families = list(make_workload(Habits(n_users=12, turns=4, edits=0.0, branches=0.0), 0))
    names = [{e.value for e in family if e.value and not e.asks and "called" in (e.text or "")} for family in families]
    for a, b in pairwise(names):
        assert not a & b


@pytest.mark.parametrize(
    ("habit", "value"),
    [
        ("n_users", 0),
        ("rate", 0.0),
        ("think_s", float("nan")),
        ("edits", 0.95),
        ("pauses", -0.1),
        ("message_tokens", 5),
    ],
)
def test_habits_that_cannot_be(habit: str, value: float) -> None:
    with pytest.raises(SpecError, match=habit):
        replace(Habits(), **{habit: value})


@pytest.mark.parametrize(
    "habits", [LIVELY, replace(LIVELY, message_tokens=9, reply_tokens=9), replace(LIVELY, system="Be brief.")]
)
def test_traces_round_trip(habits: Habits, tmp_path: Path) -> None:
    workload = make_workload(habits, 0)
    write_trace(tmp_path / "a.jsonl", workload)
    assert read_trace(tmp_path / "a.jsonl") == list(workload)
    write_trace(tmp_path / "b.jsonl", read_trace(tmp_path / "a.jsonl"))
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


HELLO = '{"at": 0, "user": "a", "action": "arrive"}\n{"at": 1, "user": "a", "action": "say", "text": "hello"}\n'


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "(all)"),
        ("[1]", "(all)"),
        ('{"user": "a", "action": "leave"}', "at"),
        ('{"at": 2, "action": "leave"}', "user"),
        ('{"at": 2, "user": "a"}', "action"),
        ('{"at": -1, "user": "a", "action": "leave"}', "at"),
        ('{"at": NaN, "user": "a", "action": "leave"}', "at"),
        ('{"at": true, "user": "a", "action": "leave"}', "at"),
        ('{"at": 0.5, "user": "a", "action": "leave"}', "at"),
        ('{"at": 2, "user": "", "action": "leave"}', "user"),
        ('{"at": 2, "user": "b", "action": "say", "text": "x"}', "user"),
        ('{"at": 2, "user": "a", "action": "arrive"}', "user"),
        ('{"at": 2, "user": "a", "action": "shout"}', "action"),
        ('{"at": 2, "user": "a", "action": ["say"]}', "action"),
        ('{"at": 2, "user": "a", "action": "say"}', "text"),
        ('{"at": 2, "user": "a", "action": "say", "text": ""}', "text"),
        ('{"at": 2, "user": "a", "action": "say", "text": "x", "n_tokens": 3}', "text"),
        ('{"at": 2, "user": "a", "action": "say", "n_tokens": 0}', "n_tokens"),
        ('{"at": 2, "user": "a", "action": "say", "text": "x", "n_reply": 1.5}', "n_reply"),
        ('{"at": 2, "user": "a", "action": "say", "text": "x", "asks": true}', "asks"),
        ('{"at": 2, "user": "a", "action": "say", "text": "x", "mood": "good"}', "mood"),
        ('{"at": 2, "user": "a", "action": "pause", "text": "x"}', "text"),
        ('{"at": 2, "user": "a", "action": "edit", "text": "x"}', "turn"),
        ('{"at": 2, "user": "a", "action": "edit", "text": "x", "turn": 1}', "turn"),
        ('{"at": 2, "user": "a", "action": "edit", "text": "x", "turn": -1}', "turn"),
        ('{"at": 2, "user": "a", "action": "branch"}', "into"),
        ('{"at": 2, "user": "a", "action": "branch", "into": "a"}', "into"),
        ('{"at": 2, "user": "c", "action": "arrive", "opening": "Be brief."}', "opening"),
        ('{"at": 2, "user": "c", "action": "arrive", "opening": [{"role": "system"}]}', "opening"),
        ('{"at": 2, "user": "c", "action": "arrive", "n_tokens": 5}', "n_tokens"),
        ('{"at": 2, "user": "a", "action": "leave"}\n{"at": 3, "user": "a", "action": "leave"}', "user"),
        ('{"at": 2, "user": "c", "action": "arrive"}\n{"at": 3, "user": "c", "action": "regenerate"}', "action"),
    ],
)
def test_a_trace_with_nonsense_is_refused_by_line_and_field(line: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(HELLO + line + "\n")
    with pytest.raises(FormatError) as caught:
        read_trace(path)
    number = 2 + len(line.splitlines())
    assert f"line {number}, field {field!r}" in str(caught.value)


def test_a_trace_without_events_or_file(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    for name in ("empty.jsonl", "bytes.jsonl", "missing.jsonl"):
        with pytest.raises(FormatError, match=name):
            read_trace(tmp_path / name)
