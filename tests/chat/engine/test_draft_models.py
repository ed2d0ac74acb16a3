"""Drafts of a smaller model in the engine: replies are the same with them, and its sequences follow the jobs."""

from __future__ import annotations

import random

import pytest

from hybridmem.chat.engine.draft_models import ModelDrafter
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.memory.prefix import PrefixCache
from tests.chat.engine.test_drafting import Repeating
from tests.chat.engines import draw_sampling, make_memory, run_checked


def make_drafter(budget: str = "4MiB", *, caches: bool = False, **options: object) -> ModelDrafter:
    """The draft model has other weights in effect: it lacks attention, and is right now and then."""
    small = Repeating(attention=False)
    memory = make_memory(small, budget)
    return ModelDrafter(small, memory, prefixes=PrefixCache(memory) if caches else None, **options)


def replies(
    drafter: ModelDrafter | None, seed: int, *, caches: bool = False, budget: str = "4MiB"
) -> tuple[list[Generation], Engine]:
    generator, model = random.Random(seed), Repeating()
    memory = make_memory(model, budget)
    prefixes = PrefixCache(memory) if caches else None
    engine = Engine(
        model, memory, None, stop_ids=(4,) if seed % 2 else (), step_tokens=40, max_running=4, prefixes=prefixes,
        speculation=Speculation(looks_up=seed % 3 == 0, adapts=False, drafter=drafter),
    )  # fmt: skip
    generations = []
    for _ in range(6):
        prompt = [generator.randrange(model.memory_spec.vocab_size) for _ in range(generator.randint(1, 30))]
        samplings = [draw_sampling(generator) for _ in range(generator.randint(1, 3))]
        generations += engine.submit_choices(prompt, samplings, max_tokens=generator.randint(0, 30))
    run_checked(engine)
    if drafter is not None:
        drafter.memory.check()
    return generations, engine


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", ["4MiB", "16KiB"])
def test_replies_are_the_same_with_drafts_of_a_model(seed: int, budget: str) -> None:
    caches = seed % 2 == 1
    drafter = make_drafter(caches=caches, step_tokens=20)
    without, _ = replies(None, seed, caches=caches, budget=budget)
    drafted, _ = replies(drafter, seed, caches=caches, budget=budget)
    for a, b in zip(without, drafted, strict=True):
        assert (a.token_ids, a.finish_reason, a.error) == (b.token_ids, b.finish_reason, None)
    assert sum(g.n_accepted for g in drafted) > 10
    kept = drafter.prefixes.stats().n_checkpoints if drafter.prefixes is not None else 0
    assert len(drafter.memory.sequences) == kept, "its sequences are closed with the jobs"
