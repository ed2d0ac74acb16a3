"""Fails every point of a call in turn, and looks at what is left after each."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from hybridmem.memory import HybridMemory
from tests.failure.points import KINDS, Kind, Outcome, call_with
from tests.failure.scenes import SET_UPS, Logits
from tests.failure.talking import TALKING
from tests.interrupts import TRIES_ALL, TimedOutError, try_places
from tests.interrupts import Outcome as Interrupted

_FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder in host memory, where there is one: fsync costs nothing there."""


class Scene(Protocol):
    """Defines what is looked at after a call; see `scenes.Scene` and `talking.Talk`."""

    memory: HybridMemory
    saved: bytes

    def books(self) -> list[tuple[Any, ...]]: ...
    def go_on(self) -> Logits: ...
    def file(self) -> bytes: ...
    def end(self) -> None: ...


class SetUp(Protocol):
    """Defines what makes scenes: a memory, an engine or a chat, and the calls that can be made to it."""

    @property
    def name(self) -> str: ...
    @property
    def is_exact(self) -> bool: ...
    @property
    def calls(self) -> Mapping[str, Callable[[Any], Any]]: ...
    def make(self, folder: Path, call: str) -> Scene: ...


EVERYTHING: dict[str, SetUp] = {**SET_UPS, **TALKING}
"""All set-ups by name."""


@dataclass
class Survey:
    """Counts points by call and kind, and keeps what went wrong."""

    points: Counter[tuple[str, str]] = field(default_factory=Counter)
    survived: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ends:
    """Holds what may be seen after a call, as before it or as after it, and what sequences then say."""

    before: list[tuple[Any, ...]]
    after: list[tuple[Any, ...]]
    logits_before: Logits
    logits_after: Logits
    file_after: bytes


def survey(
    set_ups: Iterable[str] = EVERYTHING,
    calls: Iterable[str] | None = None,
    kinds: Iterable[str] = KINDS,
    *,
    every: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> Survey:
    """Fail every point, or with `every` = n each n-th, of each call in each set-up."""
    found = Survey()
    for set_up in set_ups:
        for call in EVERYTHING[set_up].calls if calls is None else calls:
            _survey_call(found, EVERYTHING[set_up], call, kinds, every)
        tell(f"{set_up}: {sum(found.points.values()):,} points so far, {len(found.faults)} faults")
    return found


def _survey_call(found: Survey, set_up: SetUp, name: str, kinds: Iterable[str], every: int) -> None:
    with tempfile.TemporaryDirectory(dir=_FAST) as folder:
        ends = _ends_of(set_up, name, Path(folder) / "ends")
        for kind in kinds:
            n_points = _attempt(set_up, name, KINDS[kind], None, Path(folder) / "count", ends)[0].n_points
            for n in range(0, n_points, every):
                outcome, why = _attempt(set_up, name, KINDS[kind], n, Path(folder) / "try", ends)
                if not outcome.failed_at:
                    break
                found.points[name, kind] += 1
                found.survived += not why
                if why:
                    found.faults.append(f"{set_up.name}; {name}; {kind} {n} at {outcome.failed_at}: {why}")


def _ends_of(set_up: SetUp, name: str, folder: Path) -> Ends:
    """Return what is seen before and after a call that succeeds."""
    scenes = []
    for i in range(2):
        (folder / str(i)).mkdir(parents=True)
        scenes.append(set_up.make(folder / str(i), name))
    undone, done = scenes
    before = done.books()
    set_up.calls[name](done)
    ends = Ends(before, done.books(), undone.go_on(), done.go_on(), done.file())
    for scene in scenes:
        scene.end()
    return ends


def _attempt(
    set_up: SetUp, name: str, kind: Kind, failing: int | None, folder: Path, ends: Ends
) -> tuple[Outcome, str]:
    """Return what came of a call whose point number `failing` fails, and what is wrong then; "" if nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    scene = set_up.make(folder, name)
    outcome = call_with(lambda: set_up.calls[name](scene), kind, failing)
    if failing is None and outcome.error is not None:
        raise outcome.error
    try:
        _verify(scene, outcome, ends, is_exact=set_up.is_exact)
        scene.end()
    except Exception as error:
        return outcome, f"{type(error).__name__}: {error}"
    return outcome, ""


def _verify(scene: Scene, outcome: Outcome, ends: Ends, *, is_exact: bool) -> None:
    """Raise unless the call happened whole or not at all, and every sequence continues as it must."""
    is_done = _is_done(scene, outcome, ends)
    expected = ends.logits_after if is_done else ends.logits_before
    for place, logits in scene.go_on().items():
        assert torch.isfinite(logits).all(), f"sequence {place} reads memory that nobody wrote"
        if is_exact:
            assert torch.equal(logits, expected[place]), f"bits of sequence {place} differ"
        else:
            spread = float(expected[place].max() - expected[place].min())
            assert float((logits - expected[place]).abs().max()) <= 1e-5 * spread, f"outputs of sequence {place} differ"


def _is_done(scene: Scene, outcome: Outcome, ends: Ends) -> bool:
    """Return whether the call happened. Raise if the books say that only a part of it happened."""
    assert torch.is_grad_enabled(), "gradients stay off"
    scene.memory.check()
    found = scene.books()
    is_done = found == ends.after
    if outcome.error is None:
        assert is_done, f"it returned, and left {_difference(found, ends.after)}"
    assert is_done or found == ends.before, f"half done: {_difference(found, ends.before)}"
    # If only syncing the folder fails, the new file is there and complete.
    assert scene.file() in (scene.saved, ends.file_after), "the file is neither the old nor the new one"
    return is_done


def _difference(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> str:
    return str(
        [pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]] or (len(found), len(expected))
    )


N_USES = 25
"""So many interrupts may hit one scene with `INTERRUPTS=all` or `once`."""


def interrupt(set_up: SetUp, name: str, number: int, n_places: int) -> int:
    """Interrupt a call at its bytecodes by a signal, and look at what is left; see `tests.interrupts.try_places`.

    If all places are tried, a scene whose books are as before the call is used for the next places as well: what
    sequences go on with is seen at its last use. A place that the call does not reach then gets a new scene.

    Returns how many bytecodes were tried.
    """
    with tempfile.TemporaryDirectory(dir=_FAST) as folder:
        ends = _ends_of(set_up, name, Path(folder) / "ends")
        own, left, n_uses = Path(folder) / "try", None, 0

        def attempt() -> tuple[Callable[[], Any], Callable[[Interrupted], None]]:
            nonlocal left, n_uses
            if left is None:
                shutil.rmtree(own, ignore_errors=True)
                own.mkdir()
                n_uses = 0
            scene, left, n_uses = left or set_up.make(own, name), None, n_uses + 1

            def verify(found: Interrupted) -> None:
                nonlocal left
                outcome = Outcome(error=None if found.has_returned else TimedOutError())
                is_changed = _is_done(scene, outcome, ends) and ends.after != ends.before
                if TRIES_ALL and found.was_interrupted and not is_changed and n_uses < N_USES:
                    left = scene
                    return
                _verify(scene, outcome, ends, is_exact=set_up.is_exact)
                scene.end()

            return lambda: set_up.calls[name](scene), verify

        n_tried = try_places(attempt, n_places, number=number, operation=_operation(name))
        if left is not None:
            _verify(left, Outcome(error=TimedOutError()), ends, is_exact=set_up.is_exact)
            left.end()
        return n_tried


def _operation(name: str) -> str:
    """Return what a call has in common with others: all steps that run are one operation, and so are all ways back."""
    if name in ("step, recorded", "step, recorded again", "step, replayed"):
        return name
    first = name.replace(",", "").split()[0]
    return {"run": "step", "prefix": name}.get(first, first)
