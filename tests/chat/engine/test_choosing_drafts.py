"""The engine drafts where that pays, and elsewhere drafts cost almost nothing.

The tests set the seconds that steps take.
"""

from __future__ import annotations

import random
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
    """Takes so many seconds for each of its steps, by the clock that the test moves.

    It follows texts, for so many seconds in each step of the model, unless it is paused.
    """

    most_drafted = 8
    drafts_at_once = False

    def __init__(self, seconds: float, clock: list[float], following: float = 0.0) -> None:
        self.noted: list[tuple[int, float]] = []
        self.following_seconds, self.is_paused = 0.0, False
        self._seconds, self._clock, self._following = seconds, clock, following

    def follow(self) -> None:
        if not self.is_paused:
            self.following_seconds += self._following
            self._clock[0] += self._following

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def check(self, memory: object, tokenizer: object) -> None: ...
    def forget(self, job: object) -> None: ...
    def watch(self, model: object, running: object) -> object:
        return model

    def n_behind(self, job: object) -> int:
        return 1

    def draft(self, wanted: dict[Job, int]) -> Drafts:
        n = max(wanted.values())
        self.noted = [(len(wanted), self._seconds)] * n
        self._clock[0] += n * self._seconds
        return {job: [0] * n for job, n in wanted.items()}


def decode(
    monkeypatch: pytest.MonkeyPatch, n_right: int, seconds: float, *, following: float = 0.0, n_jobs: int = 4,
    n_steps: int = 2000,
) -> tuple[float, float]:  # fmt: skip
    """Return how many tokens a second steps give, compared with plain ones, and the share of steps with drafts."""
    clock = [0.0]
    monkeypatch.setattr("hybridmem.chat.engine.drafting.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    drafter = Drafter(seconds, clock, following)
    drafting = Drafting(make_memory(Toy()), 256, Speculation(drafter=cast(JobDrafter, drafter)))
    plan = [(cast(Job, make_job(i)), 1) for i in range(n_jobs)]
    n_tokens = n_drafting = 0
    for _ in range(n_steps):
        started = clock[0]
        drafts = drafting.propose(plan)
        drafter.follow()
        clock[0] += _STEP + _ROW * sum(map(len, drafts.values()))
        for job, draft in drafts.items():
            drafting.count(job, draft, range(min(n_right, len(draft))))
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


def test_drafts_for_jobs_that_leave_the_step_have_lost_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that finds too little memory is planned again, and only a prompt may be left."""
    clock = [0.0]
    monkeypatch.setattr("hybridmem.chat.engine.drafting.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    drafter = Drafter(0.0005, clock)
    drafting = Drafting(make_memory(Toy()), 256, Speculation(drafter=cast(JobDrafter, drafter), adapts=False))
    plan = [(cast(Job, make_job(0)), 1)]
    for _ in range(20):
        drafting.note(plan, {}, _STEP)
        started, drafts = clock[0], drafting.propose(plan)
        clock[0] += _STEP
        drafting.count(plan[0][0], drafts[plan[0][0]], range(8))
        drafting.note(plan, drafts, clock[0] - started)
    started = clock[0]
    assert drafting.propose(plan)
    clock[0] += _STEP
    lost = drafting.note([(cast(Job, make_job(1)), 5)], {}, clock[0] - started)
    assert lost == pytest.approx(-8 * 0.0005)


@pytest.mark.parametrize(("n_right", "seconds"), [(0, 0.0005), (0, 0.01), (8, 0.02), (1, 0.01)])
def test_a_drafter_that_does_not_pay_costs_at_most_two_percent(
    monkeypatch: pytest.MonkeyPatch, n_right: int, seconds: float
) -> None:
    """Its drafts are wrong, or right but too slow."""
    speed, share = decode(monkeypatch, n_right, seconds)
    assert speed > 0.98 and share < 0.1
    assert share > 0, "it was tried"


@pytest.mark.parametrize(("n_right", "seconds"), [(0, 0.0005), (8, 0.01)])
def test_a_drafter_that_follows_texts_in_vain_is_paused(
    monkeypatch: pytest.MonkeyPatch, n_right: int, seconds: float
) -> None:
    speed, share = decode(monkeypatch, n_right, seconds, following=_STEP / 2, n_steps=20_000)
    assert speed > 0.98 and share > 0, "it was tried"


def test_a_drafter_that_pays_is_not_paused_because_it_follows_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    speed, share = decode(monkeypatch, n_right=8, seconds=0.0005, following=_STEP / 10)
    assert speed > 1.6 and share > 0.9


def copy_text(
    monkeypatch: pytest.MonkeyPatch, said: list[int], row: float, *, slow_steps: int = 0
) -> tuple[float, int]:
    """Return how many tokens a second a reply brings, against plain steps, and the number of drafted tokens.

    The prompt is 0, 1, ... 199. Each drafted row takes `row` seconds, and the first drafted steps half a second more.
    """
    clock, n_steps, n_slow, n_drafted = [0.0], 0, slow_steps, 0
    monkeypatch.setattr("hybridmem.chat.engine.drafting.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    drafting = Drafting(make_memory(Toy(), rollback_window=32), 256, Speculation(looks_up=True))
    job = make_job(0)
    job.tokens, job.generation.n_prompt = [*range(200)], 200
    job.sampler = SimpleNamespace(possible=len)
    job.generation.token_ids.append(said[0])
    job.tokens.append(said[0])
    plan = [(cast(Job, job), 1)]
    while len(job.generation.token_ids) < len(said):
        started, n_said = clock[0], len(job.generation.token_ids)
        draft = drafting.propose(plan).get(job, [])
        n_slow -= bool(draft)
        clock[0] += _STEP + row * len(draft) + (0.5 if draft and n_slow >= 0 else 0.0)
        n_right = next((i for i, (a, b) in enumerate(zip(draft, said[n_said:], strict=False)) if a != b), len(draft))
        if draft:
            drafting.count(cast(Job, job), draft, range(n_right))
        job.generation.token_ids += said[n_said : n_said + n_right + 1]
        job.tokens += said[n_said : n_said + n_right + 1]
        n_drafted, n_steps = n_drafted + len(draft), n_steps + 1
        drafting.note(plan, {job: draft} if draft else {}, clock[0] - started)
    return len(said) * _STEP / (clock[0] - 0.5 * slow_steps), n_drafted


def test_a_copy_with_changes_comes_in_long_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 40th token differs from the prompt.

    Kernels that are compiled for the first drafts do not change what is learned.
    """
    said = [900 if i % 40 == 39 else i for i in range(190)]
    assert copy_text(monkeypatch, said, 0.0005)[0] > 3.6
    assert copy_text(monkeypatch, said, 0.0005, slow_steps=3)[0] > 3.6
    assert 1.5 < copy_text(monkeypatch, said, 0.002)[0], "rows that cost a fifth of a step"


def test_text_that_repeats_words_only_is_not_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens of the prompt come again, but other tokens follow them.

    So guesses are found, and none is right.
    """
    starts = random.Random(0).choices(range(190), k=200)
    said = [token for i, start in enumerate(starts) for token in (start, start + 1, start + 2, 500 + i)]
    speed, n_drafted = copy_text(monkeypatch, said, 0.001)
    assert speed > 0.98 and n_drafted < 24


def test_a_reply_that_repeats_does_not_slow_down_the_others() -> None:
    """One of eight replies loops.

    Its drafts would give many tokens, but each step of all others would take longer.
    """
    drafting = Drafting(make_memory(Toy(), rollback_window=32), 256, Speculation(looks_up=True))
    jobs = [make_job(i) for i in range(8)]
    n_drafted = 0
    for i, job in enumerate(jobs):
        job.tokens, job.sampler = [*range(100 * i, 100 * i + 9)], SimpleNamespace(possible=len)
    for at in range(300):
        plan = [(cast(Job, job), 1) for job in (jobs if at % 3 else jobs[:1])]
        drafts = drafting.propose(plan)
        for job, draft in drafts.items():
            drafting.count(job, draft, range(len(draft)))
        n_drafted += sum(map(len, drafts.values())) if len(plan) == 8 else 0
        for i, (job, _) in enumerate(plan):
            new = 1 + len(drafts.get(job, []))
            job.tokens += [7] * new if i == 0 else [10_000 + 1000 * i + at]
        rows = sum(map(len, drafts.values()))
        drafting.note(plan, drafts, _STEP + 0.0001 * len(plan) + 0.0005 * rows)
    assert n_drafted < 24, "only those that measure what drafts cost"


def test_drafted_rows_take_as_long_in_steps_with_prompts_as_in_others() -> None:
    """Rows of prompts are cheap, because their logits are not computed. All eight replies loop.

    Their drafts would pay if a drafted row took as long as one of a prompt. It takes 30 times as long.
    """
    drafting = Drafting(make_memory(Toy(), rollback_window=32), 256, Speculation(looks_up=True))
    jobs, prompt, n_drafted = [make_job(i) for i in range(8)], make_job(8), 0
    prompt.is_prefilling = True
    for i, job in enumerate(jobs):
        job.tokens, job.sampler = [*range(100 * i, 100 * i + 9)], SimpleNamespace(possible=len)
    for at in range(300):
        n_prompt = (0, 40, 90)[at % 3]
        plan = [(cast(Job, job), 1) for job in jobs] + ([(cast(Job, prompt), n_prompt)] if n_prompt else [])
        drafts = drafting.propose(plan)
        for job, draft in drafts.items():
            drafting.count(job, draft, range(len(draft)))
        n_rows = sum(map(len, drafts.values()))
        n_drafted += n_rows if n_prompt else 0
        for job in jobs:
            job.tokens += [7] * (1 + len(drafts.get(job, [])))
        drafting.note(plan, drafts, _STEP + 0.0001 * (8 + n_prompt) + 0.003 * n_rows)
    assert n_drafted == 0


@pytest.mark.parametrize("n_looping", [1, 4, 7, 8])
@pytest.mark.parametrize("row", [0.0002, 0.001])
def test_drafts_never_delay_the_end_of_a_batch(monkeypatch: pytest.MonkeyPatch, n_looping: int, row: float) -> None:
    """Eight replies begin and end together, and some of them loop.

    Their right drafts would end these replies early, while each step of the others would take longer. All steps have
    the same size at first, so it is not known what a reply less saves.
    """
    speed, _ = decode_batch(monkeypatch, n_looping, row, adapts=True)
    assert speed > 0.98
    if n_looping == 8:
        assert speed > (2.5 if row < 0.001 else 1.1)


@pytest.mark.parametrize("n_looping", [1, 4, 7, 8])
def test_drafts_that_delay_the_end_of_a_batch_count_as_a_loss(monkeypatch: pytest.MonkeyPatch, n_looping: int) -> None:
    """All tokens of these drafts are right, but drafts of some replies make the steps of all others slower."""
    speed, counted = decode_batch(monkeypatch, n_looping, 0.001, adapts=False)
    assert (counted < 1) == (speed < 1) == (n_looping < 8)
    if n_looping == 8:
        assert counted == pytest.approx(speed, abs=0.1)


def decode_batch(
    monkeypatch: pytest.MonkeyPatch, n_looping: int, row: float, *, adapts: bool, n_tokens: int = 400
) -> tuple[float, float]:
    """Return how many times as fast as plain steps a batch of eight replies ends, and the same by what was counted.

    Each drafted row takes `row` seconds. Replies loop after 20 tokens.
    """
    clock, counted = [0.0], 0.0
    monkeypatch.setattr("hybridmem.chat.engine.drafting.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    speculation = Speculation(looks_up=True, adapts=adapts)
    drafting = Drafting(make_memory(Toy(), rollback_window=32), 256, speculation)
    jobs, plain = [make_job(i) for i in range(8)], n_tokens * (_STEP + 0.0001 * 8)
    for job in jobs:
        job.tokens, job.sampler = [], SimpleNamespace(possible=len)
    while going := [i for i, job in enumerate(jobs) if len(job.tokens) < n_tokens]:
        plan, started = [(cast(Job, jobs[i]), 1) for i in going], clock[0]
        drafts = drafting.propose(plan)
        clock[0] += _STEP + 0.0001 * len(plan) + row * sum(map(len, drafts.values()))
        for i, (job, _) in zip(going, plan, strict=True):
            at, draft = len(job.tokens), drafts.get(job, [])
            following = [7 if i < n_looping and n >= 20 else 1000 * i + n for n in range(at, at + len(draft) + 1)]
            n_right = next((k for k, token in enumerate(draft) if token != following[k]), len(draft))
            if draft:
                drafting.count(job, draft, range(n_right))
            job.tokens += following[: n_right + 1]
        counted += drafting.note(plan, drafts, clock[0] - started)
    return plain / clock[0], (clock[0] + counted) / clock[0]
