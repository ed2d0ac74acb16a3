"""Holds tables of wrong calls, with what each error must say. Nothing may have changed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hybridmem.memory import HybridMemory, HybridMemoryError

Row = tuple[str, str, str]
"""A statement, and two words of its error: the value that was wrong, and what to do instead."""


def verdict(row: Row, names: dict[str, Any]) -> str:
    """Return what came of a wrong call: "good", "accepted", "bare ...", or "wrong remedy ..."."""
    code, value, remedy = row
    try:
        exec(code, dict(names))
    except HybridMemoryError as error:
        missing = [word for word in (value, remedy) if word not in str(error)]
        return f"wrong remedy: {error} | lacks {missing}" if missing else "good"
    except Exception as error:
        return f"bare {type(error).__name__}: {error}"
    return "accepted"


def assert_refused(rows: Iterable[Row], names: dict[str, Any], memories: Iterable[HybridMemory] = ()) -> None:
    """Assert that every row raises an error of the library that says both words, and changes no memory."""
    kept = [(memory, picture_of(memory)) for memory in memories]
    found: list[str] = []
    for row in rows:
        said = verdict(row, names)
        found += [f"{row[0]}\n    {said}"] if said != "good" else []
        for memory, picture in kept:
            memory.check()
            assert picture_of(memory)() == picture(), row[0]
    assert not found, "\n".join([f"{len(found)} wrong calls are not told well", *found])


def picture_of(memory: HybridMemory) -> Callable[[], tuple[Any, ...]]:
    """Return what a wrong call must not change: bytes by place, and the length of each open sequence."""
    usage = memory.usage()
    held = (
        dict(usage.held),
        {id: (s.n_tokens, s.is_checkpoint, dict(s.held), s.swapped_bytes) for id, s in usage.by_sequence.items()},
    )
    return lambda: held
