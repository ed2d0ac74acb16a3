"""A Ctrl-C anywhere: all is done, or nothing, and what did not return has not happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memory import AttentionSpec, HybridMemory, MemorySpec, RecurrentSpec, Sequence, StateTensor
from tests.interrupts import Outcome, try_places
from tests.toy import VOCAB

DRY = torch.device("meta")
RECURRENT = RecurrentSpec("average", (5,), (StateTensor("mean", (5,)),))


def make_memory(**options: Any) -> HybridMemory:
    layers = ((AttentionSpec(2, 1, 4),), (RECURRENT,), (AttentionSpec(2, 1, 4, window=5),))
    return HybridMemory(MemorySpec(layers, VOCAB, model="dry", device=DRY), "1MiB", rollback_window=4, page_tokens=4, **options)


def books(memory: HybridMemory) -> list[tuple[int, bool, list[int], int, bool]]:
    """What can be seen of all sequences."""
    handles = memory._ledger.handles.values()
    return [(h.id, h.is_checkpoint, h.tokens.tolist(), h.horizon, h.is_swapped) for h in sorted(handles, key=lambda h: h.id)]


def feed(memory: HybridMemory, sequence: Sequence, n_tokens: int) -> None:
    with memory.step({sequence: [1] * n_tokens}):
        pass


class Scene:
    """A memory with two sequences and a checkpoint, and a place for a file."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.memory = make_memory(**options)
        self.a, self.b = self.memory.open(), self.memory.open()
        for sequence, n_tokens in ((self.a, 11), (self.b, 3)):
            self.memory.run(None, {sequence: [1] * n_tokens}, max_tokens=4)
        self.mark = self.memory.checkpoint(self.a)
        feed(self.memory, self.a, 2)
        self.path = folder / "a.safetensors"
        self.before = books(self.memory)

    def end(self) -> None:
        """Everything can still be used, and given back."""
        memory = self.memory
        memory.check()
        for handle in list(memory._ledger.handles.values()):
            if handle.is_swapped:
                memory.swap_in(handle)
            if not handle.is_checkpoint:
                feed(memory, handle, 1)
            memory.check()
        for handle in list(memory._ledger.handles.values()):
            memory.close(handle)
        memory.check()
        assert memory.usage().used_bytes == 0


def step_and_accept(scene: Scene) -> None:
    with scene.memory.step({scene.a: [1] * 3, scene.b: [2]}) as step:
        step.accept({scene.a: 1})


def step_that_fails(scene: Scene) -> None:
    try:
        with scene.memory.step({scene.a: [1] * 9, scene.b: [2]}):
            raise ValueError
    except ValueError:
        pass


def step_in_a_variable(scene: Scene) -> None:
    """Who keeps the step, or the traceback, keeps the sequences no longer."""
    scene.step = scene.memory.step({scene.a: [1]})  # type: ignore[attr-defined]
    with scene.step:  # type: ignore[attr-defined]
        pass


OPERATIONS: dict[str, Callable[[Scene], Any]] = {
    "step": step_and_accept,
    "step that fails": step_that_fails,
    "step in a variable": step_in_a_variable,
    "run of one step": lambda s: s.memory.run(None, {s.a: [1] * 3, s.b: [2]}),
    "run in chunks": lambda s: s.memory.run(None, {s.a: [1] * 9, s.b: [2]}, max_tokens=4),
    "fork": lambda s: s.memory.fork(s.a),
    "checkpoint": lambda s: s.memory.checkpoint(s.a),
    "reorder": lambda s: s.memory.reorder({s.a: s.b, s.b: s.a}),
    "rollback": lambda s: s.memory.rollback(s.a, to=12),
    "rollback to a mark": lambda s: s.memory.rollback(s.a, to=s.mark),
    "rollback to a mark's position": lambda s: s.memory.rollback(s.a, to=6),
    "close": lambda s: s.memory.close(s.a),
    "swap out": lambda s: s.memory.swap_out(s.a),
}
ALL_OR_NOTHING = ("run of one step", "run in chunks", "fork", "checkpoint")
"""What promises to have done nothing if it raises."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_ctrl_c_anywhere_leaves_all_or_nothing(name: str, tmp_path: Path) -> None:
    done: list[Any] = []

    def attempt() -> tuple[Callable[[], Any], Callable[[Outcome], None]]:
        scene = Scene(tmp_path)

        def verify(outcome: Outcome) -> None:
            scene.memory.check()
            after = books(scene.memory)
            done[:] = done or [after]  # the first time nothing interrupts
            allowed = [done[0]] if outcome.has_returned else [scene.before] if name in ALL_OR_NOTHING else [scene.before, done[0]]
            assert after in allowed
            scene.end()

        return lambda: OPERATIONS[name](scene), verify

    assert try_places(attempt) > 20
