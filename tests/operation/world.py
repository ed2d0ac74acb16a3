"""An engine operates in simulated time: one seed decides arrivals, cancellations, shocks and failures.

Only one thing follows from measured speed: whether an evicted prefix is worth host memory. The promises hold whatever
happens. Every request ends in time, for a reason, and says what it would say alone. Nobody waits for ever. The books
balance after every step, and nothing is left behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine, Generation, Sampling
from hybridmem.memory import CapacityError, HybridMemory, Step
from hybridmem.memory.prefix.cache import PrefixCache
from tests.chat.engines import choose_alone, draw_sampling
from tests.operation.strangers import Strangers
from tests.toy import VOCAB, Toy

N_ARRIVALS = 40
MOST_STEPS = 6000
"""Steps after which somebody counts as waiting for ever: some fifty times those that the tokens need."""

_TOY = Toy()


class ModelError(Exception):
    """The model raises this in the middle of a step."""


class ListenerError(Exception):
    """A client's callback raises this."""


@dataclass
class Clock:
    """Tells the seconds that the simulation says."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Asked:
    """Holds a request, and the values from which it was made."""

    generation: Generation
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    deadline: float | None
    listener_fails: bool


@dataclass
class World:
    """Runs one seed to its end.

    Attributes:
        events: what happened, by name: a simulation in which nothing does proves nothing.
    """

    seed: int
    folder: Path
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random, self.clock = Random(self.seed), Clock()
        random = self._random
        self.memory_spec, self.config = _TOY.memory_spec, None
        self._fails = 0
        self.memory = HybridMemory(
            _TOY.memory_spec, random.choice(["28KiB", "44KiB", "1MiB"]), rollback_window=random.choice([0, 5, 8]),
            page_tokens=4, poison=True, host_budget=random.choice([1 << 12, 1 << 16, None]),
            swap_dir=random.choice([None, self.folder / "swap"]),
        )  # fmt: skip
        self.cache = PrefixCache(self.memory) if random.random() < 0.8 else None
        self.engine = Engine(
            self, self.memory, None, stop_ids=(0,), prefixes=self.cache,  # type: ignore[arg-type]
            step_tokens=random.choice([7, 24, 64]), max_running=random.choice([2, 6]), clock=self.clock,
            speculation=Speculation(looks_up=random.random() < 0.5, adapts=False),
        )  # fmt: skip
        self._bases = [[random.randrange(1, VOCAB) for _ in range(30)] for _ in range(3)]
        self._asked: list[Asked] = []
        self._strangers = Strangers(self.memory, _TOY, random, 200, self.events)

    def __call__(self, step: Step) -> Any:
        """Run the model, or fail after all of its layers."""
        logits = _TOY(step)
        if self._fails:
            self._fails -= 1
            raise ModelError
        return logits

    def run(self) -> None:
        """Simulate from the first arrival until nobody is left. Raises AssertionError where a promise is broken."""
        happenings: list[tuple[float, Callable[[], None]]] = [
            (0.5, self._arrive), (0.06, self._cancel), (0.05, self._break_model), (0.06, self._strangers.take_room),
            (0.1, self._strangers.give_room),
        ]  # fmt: skip
        for _ in range(MOST_STEPS):
            self.clock.now += self._random.choice((0.01, 0.01, 0.5))
            if len(self._asked) < N_ARRIVALS:
                for chance, happen in happenings:
                    if self._random.random() < chance:
                        happen()
            else:
                self._strangers.give_room()
            try:
                self.engine.step()
            except ModelError:
                self.events["model failed"] += 1
            self.memory.check()
            if self.engine.is_idle and len(self._asked) >= N_ARRIVALS:
                self._end()
                return
        waiting = [asked.generation for asked in self._asked if not asked.generation.is_finished]
        raise AssertionError(f"seed {self.seed}: {len(waiting)} wait for ever, after {MOST_STEPS} steps: {waiting[:3]}")

    # The methods below do what happens.

    def _arrive(self) -> None:
        random = self._random
        base = random.choice(self._bases)
        tail = [random.randrange(VOCAB) for _ in range(random.randrange(1, 20))]
        prompt = base[: random.choice((0, 8, 30))] + tail
        deadline_s = random.choice((None, None, None, 0.3, 5.0))
        fails = random.random() < 0.08

        def hear(generation: Generation, piece: str) -> None:
            if fails and len(generation.token_ids) > 2:
                raise ListenerError

        max_tokens, sampling = random.randrange(1, 20), draw_sampling(random)
        generation = self.engine.submit(
            prompt, max_tokens=max_tokens, sampling=sampling, deadline_s=deadline_s, on_token=hear,
            priority=random.choice((0, 0, 1)), owner=random.choice(("alice", "bob")),
            prediction=random.choice(((), base)),
        )  # fmt: skip
        deadline = None if deadline_s is None else self.clock.now + deadline_s
        self._asked.append(Asked(generation, prompt, max_tokens, sampling, deadline, fails))

    def _cancel(self) -> None:
        if self._asked:
            self.engine.cancel(self._random.choice(self._asked).generation)

    def _break_model(self) -> None:
        self._fails = self._random.randrange(1, 4)

    # The methods below check what must hold.

    def _end(self) -> None:
        for asked in self._asked:
            self._check(asked)
        self.events["preempted"] += self.engine.stats.n_preempted
        self.events["reused"] += self.engine.stats.n_reused
        self.events["drafted"] += self.engine.stats.n_drafted
        self._strangers.give_room()
        if self.cache is not None:
            self.cache.close()
        self.memory.check()
        usage = self.memory.usage()
        assert usage.used_bytes + usage.host_bytes + usage.disk_bytes == 0, f"seed {self.seed}: {usage}"
        self.memory.close_all()

    def _check(self, asked: Asked) -> None:
        generation, said = asked.generation, asked.generation.token_ids
        where = f"seed {self.seed}, generation {generation.id}, {generation.finish_reason}: {generation.error!r}"
        assert generation.finish_reason is not None, where
        self.events[generation.finish_reason] += 1
        assert said == choose_alone(_TOY, asked.prompt, said, asked.sampling), where
        if generation.finish_reason == "stop":
            assert said[-1] == 0 and 0 not in said[:-1], where
        elif generation.finish_reason == "length":
            assert len(said) == asked.max_tokens, where
        elif generation.finish_reason == "deadline":
            assert asked.deadline is not None and generation.finished_at is not None, where
            assert generation.finished_at >= asked.deadline, where
        elif generation.finish_reason == "error":
            assert isinstance(generation.error, ListenerError | CapacityError), where
            assert not isinstance(generation.error, ListenerError) or asked.listener_fails, where
