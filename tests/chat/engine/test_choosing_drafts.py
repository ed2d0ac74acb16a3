"""Whether a drafter is used: where it pays, and it costs next to nothing elsewhere. Seconds are given here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hybridmem.chat.engine.draft_models import Drafts, JobDrafter
from hybridmem.chat.engine.drafting import Drafting, Speculation
from hybridmem.chat.engine.requests import Generation, Job
from tests.chat.engines import make_memory
from tests.toy import Toy

_STEP, _ROW = 0.010, 0.001
"""Seconds of a step that decodes, and of each drafted row in it."""


class Drafter:
    """Each of its steps takes so many seconds; it asks the clock that the test moves."""

    most_drafted = 8

    def __init__(self, seconds: float, clock: list[float]) -> None:
        self.noted: list[tuple[int, float]] = []
        self._seconds, self._clock = seconds, clock

    def check(self, memory: object, tokenizer: object) -> None: ...
    def forget(self, job: object) -> None: ...
    def n_behind(self, job: object) -> int:
        return 1

    def draft(self, wanted: dict[Job, int]) -> Drafts:
        n = max(wanted.values())
        self.noted = [(len(wanted), self._seconds)] * n
        self._clock[0] += n * self._seconds
        return {job: [0] * n for job, n in wanted.items()}


def decode(
    monkeypatch: pytest.MonkeyPatch, n_right: int, seconds: float, *, n_jobs: int = 4, n_steps: int = 2000
) -> tuple[float, float]:
    """Return how many tokens a second steps bring, against plain ones, and the share of steps with drafts."""
    clock = [0.0]
    monkeypatch.setattr("hybridmem.chat.engine.drafting.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    drafter = cast(JobDrafter, Drafter(seconds, clock))
    drafting = Drafting(make_memory(Toy()), 256, Speculation(drafter=drafter))
    plan = [(cast(Job, make_job(i)), 1) for i in range(n_jobs)]
    n_tokens = n_drafting = 0
    for _ in range(n_steps):
        started = clock[0]
        drafts = drafting.propose(plan)
        clock[0] += _STEP + _ROW * sum(map(len, drafts.values()))
        for job, draft in drafts.items():
            drafting.count(job, len(draft), min(n_right, len(draft)))
            n_tokens += min(n_right, len(draft))
        n_tokens += n_jobs
        n_drafting += bool(drafts)
        drafting.note(plan, drafts, clock[0] - started)
    return n_tokens / clock[0] / (n_jobs / _STEP), n_drafting / n_steps


def make_job(i: int) -> Any:
    job = SimpleNamespace(
        request=SimpleNamespace(prediction=(), max_tokens=10**9), generation=Generation(i, 1, 0.0), tokens=[1],
        ending=None, is_prefilling=False, sampler=None, wants_choice=lambda n: True,
    )  # fmt: skip
    return type("Hashable", (), vars(job) | {"wants_choice": staticmethod(lambda n: True)})()


def test_a_drafter_that_is_right_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    speed, share = decode(monkeypatch, n_right=8, seconds=0.0005)
    assert speed > 1.8 and share > 0.9
    speed, share = decode(monkeypatch, n_right=2, seconds=0.0005)
    assert speed > 1.2 and share > 0.9, "short drafts pay as well"


@pytest.mark.parametrize(("n_right", "seconds"), [(0, 0.0005), (0, 0.01), (8, 0.02), (1, 0.01)])
def test_a_drafter_that_does_not_pay_costs_at_most_two_percent(
    monkeypatch: pytest.MonkeyPatch, n_right: int, seconds: float
) -> None:
    """Wrong drafts, and right ones that take too long."""
    speed, share = decode(monkeypatch, n_right, seconds)
    assert speed > 0.98 and share < 0.1
    assert share > 0, "it was tried"
