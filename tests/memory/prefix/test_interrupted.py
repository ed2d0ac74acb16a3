"""After an exception anywhere in a prefix cache, its books describe its checkpoints, and no checkpoint is left over."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridmem.memory import AttentionSpec, HybridMemory, MemorySpec, RecurrentSpec, StateTensor
from hybridmem.memory.prefix import PrefixCache
from tests.extent import few_cases
from tests.inside import assert_books_follow
from tests.interrupts import Outcome, by_handlers, try_places
from tests.toy import Toy

SPEC = MemorySpec(
    ((AttentionSpec(2, 1, 4),), (RecurrentSpec("average", (5,), (StateTensor("mean", (5,)),)),)),
    19, model="dry", device=torch.device("meta"),
)  # fmt: skip
PROMPTS = [[1] * 9, [1] * 6 + [2] * 6, [1] * 6 + [2] * 3 + [3] * 4, [4] * 7]


class Scene:
    """Holds a cache with prompts of two owners, one of them outside of the budget, and a sequence to insert."""

    def __init__(self, spec: MemorySpec = SPEC, model: Toy | None = None) -> None:
        ticks = itertools.count()
        self.model = model
        self.memory = HybridMemory(spec, "1MiB", rollback_window=4, page_tokens=4)
        self.cache = PrefixCache(self.memory, grid_tokens=0, max_bytes="1MiB", now=lambda: float(next(ticks)))
        for prompt, owner in itertools.product(PROMPTS[:3], (None, "you")):
            sequence = self.fed(prompt)
            self.cache.insert(sequence, owner, seconds_to_live=1e6)
            self.memory.close(sequence)
        self.cache.reclaim(1)
        self.live = self.fed(PROMPTS[3])

    def fed(self, prompt: list[int]) -> Any:
        sequence, lookup = self.cache.open(prompt)
        with self.memory.step({sequence: prompt[lookup.reused :]}) as step:
            if self.model is not None:
                self.model(step)
        return sequence

    def seen(self) -> list[Any]:
        """Return what a user sees of the cache."""
        lookups = [self.cache.find([*prompt, 9], owner) for prompt, owner in itertools.product(PROMPTS, (None, "you"))]
        return [lookup.reused for lookup in lookups]

    def verify(self) -> None:
        self.cache.find([1])  # This call mends the books.
        assert_books_follow(self.cache)
        held = [s for s in self.memory.sequences if s.is_checkpoint]
        assert len(held) == len(self.cache.checkpoints_behind([])) + len(self.cache.checkpoints_behind([], "you"))
        assert len(self.memory.sequences) == len(held) + 1, "a fork was left over"
        for prompt in PROMPTS:
            sequence = self.fed(prompt)
            self.cache.insert(sequence)
            self.memory.close(sequence)
        assert self.seen()[::2] == [len(prompt) for prompt in PROMPTS]
        self.memory.check()
        self.cache.close()
        for sequence in self.memory.sequences:
            self.memory.close(sequence)
        self.memory.check()
        assert self.memory.usage().used_bytes == 0 and self.memory.counters.swapped_bytes == (0, 0)


def insert(scene: Scene) -> Any:
    scene.cache.insert(scene.live, priority=2.0)


def open_one(scene: Scene) -> Any:
    return scene.cache.open([*PROMPTS[1][:11], 3])


def bring_back(scene: Scene) -> Any:
    for prompt in PROMPTS[:3]:
        sequence, _ = scene.cache.open(prompt)
        scene.memory.close(sequence)


def reclaim(scene: Scene) -> Any:
    scene.cache.reclaim(scene.memory.budget_bytes)


def pin(scene: Scene) -> Any:
    scene.cache.pin(PROMPTS[2])


def forget(scene: Scene) -> Any:
    scene.cache.forget(PROMPTS[2])


def clear(scene: Scene) -> Any:
    scene.cache.clear()


@few_cases
@pytest.mark.parametrize(("call", "number"), by_handlers([open_one, insert, bring_back, reclaim, pin, forget, clear]))
def test_an_exception_anywhere_leaves_a_whole_cache(call: Callable[[Scene], Any], number: int) -> None:
    def attempt() -> tuple[Callable[[], Any], Callable[[Outcome], None]]:
        scene = Scene()

        def verify(outcome: Outcome) -> None:
            live = [s for s in scene.memory.sequences if not s.is_checkpoint and s is not scene.live]
            if call is open_one and number == signal.SIGINT:  # Only this call waits until the caller has the result.
                assert live == ([] if outcome.result is None else [outcome.result[0]])
            for sequence in live:
                scene.memory.close(sequence)
            scene.verify()

        return lambda: call(scene), verify

    edges = ("memory/prefix/kept.py", "memory/prefix/cache.py", "memory/prefix/changing.py")
    try_places(attempt, 25, edges, number)


def test_an_exception_while_a_folder_is_loaded_leaves_a_whole_cache(tmp_path: Path) -> None:
    toy = Toy()
    spec, scene = toy.memory_spec, Scene(toy.memory_spec, toy)
    scene.cache.save(tmp_path)
    expected = scene.seen()

    def attempt() -> tuple[Callable[[], Any], Callable[[Outcome], None]]:
        memory = HybridMemory(spec, "1MiB", rollback_window=4, page_tokens=4)
        cache = PrefixCache(memory, grid_tokens=0)

        def verify(outcome: Outcome) -> None:
            cache.clear()
            assert not memory.sequences
            assert cache.load(tmp_path) == sum(map(bool, expected))
            assert_books_follow(cache)
            memory.close_all()

        return lambda: cache.load(tmp_path), verify

    try_places(attempt, 25, ("memory/prefix/kept.py", "memory/storage/folders.py"))
