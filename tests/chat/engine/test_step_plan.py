"""The engine admits no more requests than there is room for.

A request that begins as another does waits until that beginning is computed.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.memory.prefix.cache import PrefixCache
from tests.chat.engines import decode_alone, draw_prompt, make_memory, run_checked, scheduler_of
from tests.extent import only_in_long
from tests.toy import VOCAB, Toy

SYSTEM = draw_prompt(random.Random(0), 150, VOCAB)


def make_sharing(model: Any, budget: int | str = "4MiB", **options: Any) -> Engine:
    memory = make_memory(model, budget)
    return Engine(
        model, memory, None, prefixes=PrefixCache(memory, grid_tokens=64), step_tokens=64, max_running=20, **options
    )


def submit_alike(engine: Engine, n: int, **options: Any) -> list[Generation]:
    """Submit requests together. They share one new beginning, and each has an end of its own."""
    return [engine.submit([*SYSTEM, i, 1, 2, 3, *[i] * 20], **({"max_tokens": 3} | options)) for i in range(n)]


def reused(generations: list[Generation]) -> list[int]:
    return [g.lookup.reused for g in generations if g.lookup is not None]


@pytest.mark.parametrize(
    "model", [Toy(), Toy(recurrent=False), Toy(attention=False)], ids=["hybrid", "attention", "recurrent"]
)
def test_requests_that_come_together_compute_once_what_they_begin_with(model: Any) -> None:
    engine = make_sharing(model)
    generations = submit_alike(engine, 12)
    run_checked(engine)
    assert reused(generations) == [0, *[len(SYSTEM)] * 11]
    for i in (0, 5, 11):
        assert generations[i].token_ids == decode_alone(model, [*SYSTEM, i, 1, 2, 3, *[i] * 20], 3)


def test_who_begins_otherwise_or_belongs_to_others_waits_for_nobody() -> None:
    engine = make_sharing(Toy())
    first, second = submit_alike(engine, 2)
    other = engine.submit([5, *SYSTEM], max_tokens=3)
    stranger = engine.submit([*SYSTEM, 7], max_tokens=3, owner="stranger")
    short = engine.submit([*SYSTEM[:10], 9], max_tokens=3)
    engine.step()
    asked = (first, second, other, stranger, short)
    assert [g.lookup is not None for g in asked] == [True, False, True, True, True], "a lookup is made on admission"
    run_checked(engine)
    assert reused([second, stranger, short]) == [len(SYSTEM), 0, 0]


@pytest.mark.parametrize("end", ["cancel", "deadline", "close"])
def test_who_waits_goes_on_when_its_leader_is_gone(end: str) -> None:
    now = [0.0]
    engine = make_sharing(Toy(), clock=lambda: now[0])
    leader = engine.submit([*SYSTEM, 0], max_tokens=3, deadline_s=1.0)
    followers = submit_alike(engine, 4)
    engine.step()
    assert engine.load.running == 1
    if end == "cancel":
        engine.cancel(leader)
    elif end == "deadline":
        now[0] = 2.0
    else:
        (live,) = (s for s in engine.memory.sequences if not s.is_checkpoint)
        engine.memory.close(live)
    run_checked(engine, most_steps=100)
    assert leader.finish_reason == {"cancel": "cancelled", "close": "error"}.get(end, end)
    assert all(g.finish_reason == "length" for g in followers) and reused(followers[1:]) == [len(SYSTEM)] * 3


@only_in_long
def test_a_budget_too_small_for_its_users_lets_fewer_in() -> None:
    """Sequences share pages but no states.

    So many requests with a common beginning need more room than a few without one.
    """
    model, rng = Toy(), random.Random(1)
    engine = make_sharing(model, 5 * make_memory(model).counters.bytes_at(260))
    n_left = dict.fromkeys(range(30), 3)
    said = {user: [*SYSTEM, user % VOCAB, user // VOCAB] for user in n_left}
    asked: dict[Generation, int] = {}

    def ask(user: int) -> None:
        said[user] += draw_prompt(rng, rng.randint(1, 9), VOCAB)
        n_left[user] -= 1
        asked[engine.submit(said[user], max_tokens=rng.randint(4, 24))] = user

    for user in n_left:
        ask(user)
    while asked:
        for generation in engine.step():
            user = asked.pop(generation)
            said[user] += generation.token_ids
            if n_left[user]:
                ask(user)
    stats = engine.stats
    engine.memory.check()
    assert stats.finished == {"length": 90} and stats.n_preempted <= 30
    assert scheduler_of(engine).most_bytes <= engine.memory.budget_bytes
