"""Counts while a simulation runs, and makes its report.

Everything except "timings" depends only on the workload, the seed, and the settings of the engine and the memory.
"""

from __future__ import annotations

import re
import time
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hybridmem.chat.engine.requests import Generation
from hybridmem.chat.engine.stats import EngineStats

STEP_SECONDS = 0.02
"""A step of the engine takes this many seconds on the virtual clock."""
_MOST_SAMPLES = 256
_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Answer:
    """Holds a question, the model's answer and the right one.

    Attributes:
        family, index: the family and the number of the event that asked the question.
        foreign: values in the answer that only other conversations had mentioned by then.
        alone: the model's answer when it served this user alone. None: no such comparison was made.
    """

    user: str
    family: int
    index: int
    question: str
    answer: str
    expected: str
    foreign: tuple[str, ...] = ()
    alone: str | None = None

    @property
    def is_right(self) -> bool:
        return self.answer == self.expected

    @property
    def is_lost(self) -> bool:
        """Return whether the answer is wrong here but right when this user is served alone.

        If so, sharing the memory has changed the answer.
        """
        return not self.is_right and self.alone == self.expected

    @property
    def is_leak(self) -> bool:
        """Return whether the answer names a value that only other users have told.

        It is no leak if the model gives the same answer when it serves this user alone.
        """
        return bool(self.foreign) and self.answer != self.alone


@dataclass
class Sample:
    """Holds the counts after a step.

    `seconds` is the time on the simulation's clock. `swapped` counts swapped-out sequences, whether users or the engine
    hold them.
    """

    step: int
    seconds: float
    running: int
    waiting: int
    silent: int
    paused: int
    swapped: int
    by_kind: dict[str, int]
    host_bytes: int
    disk_bytes: int
    generated: int
    reused: int
    recomputed: int


class Samples:
    """Keeps samples at equal distances in steps. If there are too many, it drops every second one."""

    def __init__(self) -> None:
        self.rows: list[Sample] = []
        self._distance = 1
        self._next_step = 0

    def is_due(self, step: int) -> bool:
        return step >= self._next_step

    def add(self, sample: Sample) -> None:
        self.rows.append(sample)
        if len(self.rows) > _MOST_SAMPLES:
            del self.rows[1::2]
            self._distance *= 2
        self._next_step = self.rows[-1].step + self._distance


class Watch:
    """Records when the tokens of one reply come."""

    __slots__ = ("_n_tokens", "_seconds", "_step", "_tally")

    def __init__(self, tally: Tally, step: int) -> None:
        self._tally = tally
        self._step = step
        self._seconds = time.perf_counter()
        self._n_tokens = 0

    def hear(self, generation: Generation, piece: str) -> None:
        if len(generation.token_ids) == self._n_tokens:
            return
        tally, step, seconds = self._tally, self._tally.engine.n_steps, time.perf_counter()
        is_first = self._n_tokens == 0
        (tally.first_steps if is_first else tally.gap_steps).append(step - self._step)
        if not tally.is_dry:
            (tally.first_seconds if is_first else tally.gap_seconds).append(seconds - self._seconds)
        self._step, self._seconds, self._n_tokens = step, seconds, len(generation.token_ids)


@dataclass
class Tally:
    """Counts while a simulation runs.

    Attributes:
        reused: (action, way) -> how many tokens the memory held already. recomputed: (action, reason) -> how many
            tokens were computed again.
        swaps: the reason for which users were swapped out -> how often. "given up": there was no room for the swap.
        failed: the text of an error -> how many replies ended with it.
        regenerated: whether a regenerated reply had the same words -> how many replies.
        first_steps, first_seconds: the steps and seconds until the first token of each reply. gap_steps, gap_seconds:
            the steps and seconds between two tokens.
    """

    engine: EngineStats
    is_dry: bool
    actions: Counter[str] = field(default_factory=Counter)
    reused: Counter[tuple[str, str]] = field(default_factory=Counter)
    recomputed: Counter[tuple[str, str]] = field(default_factory=Counter)
    swaps: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
    regenerated: Counter[str] = field(default_factory=Counter)
    first_steps: array[int] = field(default_factory=lambda: array("I"))
    gap_steps: array[int] = field(default_factory=lambda: array("I"))
    first_seconds: array[float] = field(default_factory=lambda: array("d"))
    gap_seconds: array[float] = field(default_factory=lambda: array("d"))
    samples: Samples = field(default_factory=Samples)
    _told: set[str] = field(default_factory=set)

    def clock_of(self, step: int) -> Watch:
        """Return a `Watch` for a request that is sent after the step with this number."""
        return Watch(self, step)

    def tell(self, value: str) -> None:
        """Record that a user has told this value."""
        self._told.add(value)

    def foreign_values(self, answer: str, told: set[str]) -> tuple[str, ...]:
        """Return the values in an answer that other conversations have told, and this conversation (`told`) has not."""
        return tuple(word for word in re.findall(r"\w+", answer) if word in self._told and word not in told)


@dataclass
class Report:
    """Holds the results of a simulation.

    Attributes:
        tally: the raw counts.
        clock: the clock of `Sample.seconds` and of the arrivals, "virtual" or "wall".
        start_bytes, end_bytes: the bytes in use before the first user and after the last, with an empty cache.
        swapped: "host", "disk" or "back" -> how many sequences were swapped there.
        n_given_up: how many users' conversations ended with a failed reply.
        seconds: the whole time on the wall clock.
        n_checked_alone: how many answers were compared with those of a model that serves one user alone.
    """

    tally: Tally
    n_families: int
    clock: str
    start_bytes: int
    end_bytes: int
    peak_bytes: int
    n_evicted: int
    swapped: dict[str, int]
    seconds: float
    virtual_seconds: float
    n_given_up: int
    is_checked: bool
    workload: dict[str, Any] = field(default_factory=dict)
    n_checked_alone: int = 0

    @property
    def wrong(self) -> list[Answer]:
        return [answer for answer in self.tally.answers if not answer.is_right]

    @property
    def lost(self) -> list[Answer]:
        return [answer for answer in self.tally.answers if answer.is_lost]

    @property
    def leaks(self) -> list[Answer]:
        return [answer for answer in self.tally.answers if answer.is_leak]

    @property
    def n_differing(self) -> int:
        """Count the answers that differ, word for word, from those of a model that serves one user alone."""
        return sum(answer.alone is not None and answer.alone != answer.answer for answer in self.tally.answers)

    @property
    def is_ok(self) -> bool:
        """Return whether no answer was lost or leaked, no bytes were left in use, and no reply failed."""
        return not self.lost and not self.leaks and self.end_bytes == self.start_bytes and not self.tally.failed

    def to_json(self) -> dict[str, Any]:
        tally, engine = self.tally, self.tally.engine
        return {
            "workload": self.workload,
            "users": self.n_families,
            "clock": self.clock,
            "is_ok": self.is_ok,
            "actions": dict(sorted(tally.actions.items())),
            "answers": {
                "checked": self.is_checked,
                "asked": len(tally.answers),
                "wrong": [asdict(answer) for answer in self.wrong],
                "compared with alone": self.n_checked_alone,
                "right alone but wrong here": len(self.lost),
                "not word for word as alone": self.n_differing,
                "cross-talk": len(self.leaks),
                "regenerated": dict(tally.regenerated),
                "failed": dict(tally.failed),
                "users given up": self.n_given_up,
            },
            "tokens": {
                "fed": engine.n_fed,
                "generated": engine.n_generated,
                "reused": nest(tally.reused),
                "recomputed": nest(tally.recomputed),
            },
            "steps": engine.n_steps,
            "latency in steps": {
                "first token": percentiles(tally.first_steps),
                "between tokens": percentiles(tally.gap_steps),
            },
            "scheduling": {
                "preemptions": engine.n_preempted,
                "swapped out by reason": dict(tally.swaps),
                "swapped out to host memory": self.swapped["host"],
                "swapped out to disk": self.swapped["disk"],
                "swapped in": self.swapped["back"],
                "checkpoints evicted": self.n_evicted,
            },
            "bytes": {"start": self.start_bytes, "end": self.end_bytes, "peak": self.peak_bytes},
            "samples": [
                asdict(sample) | {"seconds": 0.0 if self.clock == "wall" else sample.seconds}
                for sample in tally.samples.rows
            ],
            "timings": self._timings(),
        }

    def _timings(self) -> dict[str, Any]:
        tally, engine = self.tally, self.tally.engine
        seconds = max(self.seconds, 1e-9)
        if tally.is_dry:
            first, gaps = (np.asarray(steps) * STEP_SECONDS for steps in (tally.first_steps, tally.gap_steps))
        else:
            first, gaps = np.asarray(tally.first_seconds), np.asarray(tally.gap_seconds)
        return {
            "seconds": self.seconds,
            "seconds of the workload": self.virtual_seconds,
            "first token (s)": percentiles(first),
            "between tokens (s)": percentiles(gaps),
            "fed tokens/s": engine.n_fed / seconds,
            "generated tokens/s": engine.n_generated / seconds,
            "steps/s": engine.n_steps / seconds,
            "users/s": self.n_families / seconds,
            "sample seconds": [sample.seconds for sample in tally.samples.rows],
        }


def percentiles(values: Any) -> dict[str, float]:
    """Return n, mean, p50, p95, p99 and max. Without values, return only n."""
    numbers = np.asarray(values, np.float64)
    if not len(numbers):
        return {"n": 0}
    points = np.percentile(numbers, _PERCENTILES).tolist()
    named = {f"p{p}": value for p, value in zip(_PERCENTILES, points, strict=True)}
    return {"n": len(numbers), "mean": float(numbers.mean()), **named, "max": float(numbers.max())}


def nest(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Return counts by (action, way) as {action: {way: tokens}}, without zeros."""
    nested: dict[str, dict[str, int]] = {}
    for (action, way), n_tokens in sorted(counts.items()):
        if n_tokens:
            nested.setdefault(action, {})[way] = n_tokens
    return nested
