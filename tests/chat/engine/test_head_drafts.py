"""A model's own head drafts in the engine. Replies are the same with its drafts, whatever the head remembers."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridmem.chat.engine.draft_models import ModelDrafter
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.chat.engine.head_drafts import HeadDrafter
from hybridmem.chat.engine.hidden_states import HeldRows
from hybridmem.memory import HybridMemory, SpecError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import load_model
from hybridmem.models.draft_heads import HiddenRows
from tests.chat.engines import draw_sampling, make_memory, run_checked
from tests.extent import pick
from tests.models.draft_heads.mtp_checkpoints import write_mtp_checkpoint
from tests.models.families.qwen3_5 import qwen3_5_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("with-a-head")
    write_mtp_checkpoint(folder, qwen3_5_config(), is_often_right=True)
    return load_model(folder, draft_head=True)


def make_drafter(model: Any, budget: str = "4MiB", *, caches: bool = False, **options: Any) -> HeadDrafter:
    memory = make_memory(model.draft_head, budget)
    return HeadDrafter(model, model.draft_head, memory, prefixes=PrefixCache(memory) if caches else None, **options)


def replies(
    model: Any, drafter: HeadDrafter | None, seed: int, budget: str, *, caches: bool
) -> tuple[list[Generation], Engine]:
    generator, memory = random.Random(seed), make_memory(model, budget)
    prefixes = PrefixCache(memory) if caches else None
    engine = Engine(
        model, memory, None, stop_ids=(4,), step_tokens=40, max_running=4, prefixes=prefixes,
        speculation=Speculation(looks_up=seed % 3 == 0, adapts=False, drafter=drafter),
    )  # fmt: skip
    generations, begin = [], [generator.randrange(model.memory_spec.vocab_size) for _ in range(60)]
    for _ in range(6):
        prompt = begin[: generator.choice((1, 20, 60))] + [
            generator.randrange(9) for _ in range(generator.randint(1, 9))
        ]
        samplings = [draw_sampling(generator) for _ in range(generator.randint(1, 3))]
        generations += engine.submit_choices(prompt, samplings, max_tokens=generator.randint(0, 90))
    run_checked(engine)
    if drafter is not None:
        drafter.memory.check()
    return generations, engine


@pytest.mark.parametrize(("seed", "budget"), pick([(1, "64KiB")], [*product(range(6), ("4MiB", "64KiB"))]))
def test_replies_are_the_same_with_drafts_of_a_head(model: Any, seed: int, budget: str) -> None:
    """Choices fork, prompts have common beginnings, and replies are preempted.

    Sometimes the head's own memory has too little room.
    """
    caches = seed % 2 == 1
    drafter = make_drafter(model, "4MiB" if seed % 2 else "8KiB", caches=caches, step_tokens=20)
    without, plain = replies(model, None, seed, budget, caches=caches)
    drafted, engine = replies(model, drafter, seed, budget, caches=caches)
    for a, b in zip(without, drafted, strict=True):
        assert (a.token_ids, a.finish_reason, a.error) == (b.token_ids, b.finish_reason, None)
    assert engine.stats.n_accepted > 10 and plain.stats.n_steps > engine.stats.n_steps
    assert (plain.stats.n_preempted > 0) == (budget == "64KiB")
    kept = drafter.prefixes.stats().n_checkpoints if drafter.prefixes is not None else 0
    assert len(drafter.memory.sequences) == kept, "its sequences are closed with the jobs"


def follow(model: Any, drafter: ModelDrafter | None, budget: str = "4MiB", **options: Any) -> Engine:
    speculation = Speculation(adapts=False, drafter=drafter)
    return Engine(model, make_memory(model, budget), None, stop_ids=(), speculation=speculation, **options)


def noted(drafter: HeadDrafter) -> dict[int, list[int]]:
    """Return a dictionary that gets each draft from now on, by the length of the text that it continues."""
    seen, propose = dict[int, list[int]](), drafter.draft

    def note(wanted: Any) -> Any:
        drafts = propose(wanted)
        seen.update({len(job.tokens): draft for job, draft in drafts.items()})
        return drafts

    drafter.draft = note  # type: ignore[method-assign]
    return seen


def test_drafts_are_what_the_head_says_of_the_whole_text(model: Any) -> None:
    """The head remembers the right rows after rejected drafts, chunks of a prompt, and pairs that were fed ahead."""
    drafter = make_drafter(model)
    engine, seen = follow(model, drafter, step_tokens=24, max_running=4), noted(drafter)
    prompt = torch.randint(0, 40, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    generation = engine.submit(prompt, max_tokens=90)
    run_checked(engine)
    assert 0 < engine.stats.n_accepted < engine.stats.n_drafted
    text, head = [*prompt, *generation.token_ids], model.draft_head
    for n_text, draft in [*seen.items()][:: len(seen) // 4]:
        memory, own = make_memory(model), make_memory(head)
        with memory.step({memory.open(): text[: n_text - 1]}) as step:
            rows_TM = head.read(HiddenRows(model)(step)[1])
        sequence, tokens, expected = own.open(), text[1:n_text], list[int]()
        while len(expected) < len(draft):
            with own.step({sequence: tokens}) as step:
                logits_SV, rows_TM = head(step, rows_TM)
            tokens = [int(logits_SV.argmax())]
            expected += tokens
        assert draft == expected


def test_a_head_whose_prefix_is_not_known_begins_behind_it(model: Any) -> None:
    """The model's prompt comes from its prefix cache, and the head has no such prefix. It drafts all the same."""
    drafter, memory = make_drafter(model), make_memory(model)
    speculation = Speculation(adapts=False, drafter=drafter)
    prefixes = PrefixCache(memory)
    engine = Engine(model, memory, None, stop_ids=(), prefixes=prefixes, speculation=speculation)
    prompt = [7, 3, 5, 1] * 20
    told = []
    for more in ([9, 2], [9, 8]):
        generation = engine.submit([*prompt, *more], max_tokens=30)
        run_checked(engine)
        told.append(generation)
    assert told[1].lookup is not None and told[1].lookup.reused > 40 and told[1].n_drafted > 0
    plain = follow(model, None)
    again = plain.submit([*prompt, 9, 8], max_tokens=30)
    plain.run()
    assert again.token_ids == told[1].token_ids


def test_a_paused_head_holds_nothing_and_drafts_for_the_next_request_after_it(model: Any) -> None:
    drafter, prompt = make_drafter(model), [7, 3, 5, 1] * 20
    engine, plain = follow(model, drafter), follow(model, None)
    first, expected = engine.submit(prompt, max_tokens=60), plain.submit(prompt, max_tokens=60)
    for _ in range(4):
        engine.step()
    assert drafter.memory.sequences and (n_before := first.n_drafted)
    drafter.pause()
    assert not drafter.memory.sequences
    for _ in range(3):
        engine.step()
    drafter.resume()
    run_checked(engine)
    second = engine.submit([*prompt, 9], max_tokens=60)
    assert drafter.following_seconds > 0
    run_checked(engine)
    plain.run()
    assert first.n_drafted == n_before and second.n_drafted > n_before
    assert first.token_ids == expected.token_ids
    drafter.memory.check()


def test_rows_are_replaced_where_positions_are_fed_again() -> None:
    held, rows_NR = HeldRows(3), torch.arange(20.0)[:, None]
    held.add(3, rows_NR[3:8])
    held.add(6, rows_NR[16:18])
    assert held.between(4, 8).flatten().tolist() == [4, 5, 16, 17] and (held.start, held.end) == (3, 8)
    assert held.until(5).between(3, 5).flatten().tolist() == [3, 4]
    held.keep_from(6)
    assert (held.start, held.end) == (6, 8) and held.between(6, 8).flatten().tolist() == [16, 17]
    held.add(11, rows_NR[:1])
    assert (held.start, held.end) == (11, 12), "rows between are missing"


def test_a_head_that_cannot_work_is_refused(model: Any) -> None:
    head = model.draft_head
    with pytest.raises(SpecError, match="rollback_window=0"):
        HeadDrafter(model, head, make_memory(head, rollback_window=0))
    with pytest.raises(SpecError, match="made for"):
        HeadDrafter(model, head, make_memory(model))
    with pytest.raises(SpecError, match="hidden states"):
        HeadDrafter(lambda step: step, head, make_memory(head))  # type: ignore[arg-type]
    other = HybridMemory(head.memory_spec, "1MiB")
    with pytest.raises(SpecError, match="another model"):
        Engine(head, other, None, speculation=Speculation(drafter=make_drafter(model)))
