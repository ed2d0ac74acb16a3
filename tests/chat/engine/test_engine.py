"""In the engine, each request gets the reply that it would get alone, whatever happens to others or to itself."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Literal

import pytest
import torch

from hybridmem.chat.engine.engine import Engine, Generation, Sampling
from hybridmem.chat.engine.sizes import Sizes
from hybridmem.chat.prompts import Tokenizer, encode_prompt, find_stop_ids
from hybridmem.memory import CapacityError, HybridMemory, Sequence, SpecError, StepError
from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.models import LanguageModel
from tests.chat.engines import (
    Wanted,
    assert_as_alone,
    decode_alone,
    draw_prompt,
    make_engine,
    make_memory,
    private_bytes,
    run_checked,
    scheduler_of,
    submit_some,
)
from tests.counting import refused_by_number
from tests.extent import few_cases
from tests.toy import VOCAB, Toy

TEXTS = ["My cat is called Zoe.", "What is my dog called?", "I read a book today.", "My lucky number is 23. " * 12]


# The tests below compare a reply in a batch with the same reply alone.


@few_cases
def test_random_arrivals_say_what_each_would_say_alone(model: LanguageModel) -> None:
    engine, generator, wanted = make_engine(model), random.Random(0), Wanted()

    def arrive(n: int) -> None:
        if n < 30 and generator.random() < 0.4:
            wanted.extend(submit_some(engine, model, generator, generator.randint(1, 2), 60, 20))

    engine.submit([1], max_tokens=30)
    finished = run_checked(engine, arrive)
    assert len(wanted) > 10 and {g for g, *_ in wanted} <= set(finished)
    assert_as_alone(model, wanted)
    assert engine.memory.usage().used_bytes == 0
    assert engine.stats.finished == {"length": len(finished)}
    assert engine.stats.n_generated == sum(len(g.token_ids) for g in finished)
    assert engine.stats.n_fed == sum(g.n_prompt + len(g.token_ids) - 1 for g in finished)


def test_the_embedded_model_replies_as_it_does_alone(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    memory = HybridMemory(embedded.memory_spec, "64MiB", poison=True)
    engine = Engine(embedded, memory, tokenizer, step_tokens=48, max_running=3)
    prompts = [encode_prompt(tokenizer, text, is_chat=True) for text in TEXTS]
    generations = [engine.submit(prompt, max_tokens=32) for prompt in prompts]
    run_checked(engine)
    stop_ids = find_stop_ids(tokenizer, embedded)
    for generation, prompt in zip(generations, prompts, strict=True):
        assert generation.token_ids == decode_alone(embedded, prompt, 32, stop_ids=stop_ids)
        assert (generation.finish_reason, generation.token_ids[-1]) == ("stop", stop_ids[0])
        assert generation.text == tokenizer.decode(generation.token_ids, skip_special_tokens=True)
    assert [g.text for g in generations[:2]] == ["Okay, noted.", "You have not told me that."]
    assert memory.usage().used_bytes == 0


@few_cases
def test_seeds_give_the_same_tokens_alone_and_in_any_company(model: LanguageModel) -> None:
    generator = random.Random(3)
    prompt = draw_prompt(generator, 20, model.memory_spec.vocab_size)
    said: dict[int, list[list[int]]] = {1: [], 2: []}
    for n_others in (0, 1, 4):
        for seed in (1, 2):
            engine = make_engine(model)
            submit_some(engine, model, generator, n_others, 40, 20)
            generation = engine.submit(prompt, max_tokens=24, sampling=Sampling(temperature=20.0, seed=seed))
            run_checked(engine)
            said[seed].append(generation.token_ids)
    assert all(tokens == said[seed][0] for seed in said for tokens in said[seed])
    assert said[1] != said[2]


# The tests below have too little memory.


@few_cases
def test_preemption_loses_no_work_and_changes_no_word(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(4)
    engine = make_engine(model, 3 * private_bytes(model, 60))
    monkeypatch.setattr(
        "hybridmem.chat.engine.scheduling.Sizes.of", lambda self, n_tokens: 0
    )  # This lets all of them in at once.
    wanted = submit_some(engine, model, generator, 8, 40, 30)
    run_checked(engine)
    assert_as_alone(model, wanted)
    assert engine.stats.n_preempted > 0
    assert engine.stats.n_fed == sum(g.n_prompt + len(g.token_ids) - 1 for g, *_ in wanted), (
        "something was computed twice"
    )
    assert engine.memory.usage().used_bytes == 0


def test_those_who_had_to_leave_come_back_before_new_ones() -> None:
    model = Toy(recurrent=False)
    engine = make_engine(model, int(2.6 * private_bytes(model, 80)))
    # Half of max_tokens is expected, so there seems to be room.
    first = [engine.submit([i], max_tokens=100) for i in range(3)]
    late: list[Generation] = []

    def arrive(n: int) -> None:
        if not late and engine.stats.n_preempted:
            late.append(engine.submit([3], max_tokens=5))
        if engine.load.preempted:
            assert not any(g.token_ids for g in late)

    finished = run_checked(engine, arrive)
    assert engine.stats.n_swapped_in > 0
    assert finished[:2] == first[:2] and set(finished[2:]) == {first[2], *late} and late
    for i, generation in enumerate(first):
        assert generation.token_ids == decode_alone(model, [i], 100)


def test_it_does_not_thrash() -> None:
    model = Toy(recurrent=False)
    engine = make_engine(model, int(2.5 * private_bytes(model, 80)), max_running=20)
    for i in range(12):
        engine.submit([i % VOCAB], max_tokens=80)
    run_checked(engine)
    assert 0 < engine.stats.n_preempted <= 24
    assert engine.stats.finished == {"length": 12}


def test_admission_expects_what_prompts_will_need() -> None:
    model = Toy(recurrent=False)
    engine = make_engine(model, 3 * private_bytes(model, 400), step_tokens=200, max_running=20)
    for i in range(9):
        engine.submit([i] * 300, max_tokens=4)
    most = 0

    def watch(n: int) -> None:
        nonlocal most
        most = max(most, engine.load.running)

    run_checked(engine, watch)
    assert engine.stats.n_preempted == 0
    assert 2 <= most <= 4


def test_large_limits_on_replies_keep_nobody_out() -> None:
    engine = make_engine(Toy())
    generations = [engine.submit([i], max_tokens=10**6) for i in range(3)]
    engine.step()
    assert engine.load.running == 3 and [len(g.token_ids) for g in generations] == [1, 1, 1], (
        "prompts of one token share a step"
    )


@pytest.mark.parametrize("fold", ["keep", "replay"])
@pytest.mark.parametrize("page_tokens", [1, 4, 32])
def test_admission_knows_what_a_sequence_takes(page_tokens: int, fold: Literal["keep", "replay"]) -> None:
    """It knows this to the byte, also for lengths that are not rounded, whatever the memory was made with."""
    memory = HybridMemory(Toy().memory_spec, "1MiB", rollback_window=5, page_tokens=page_tokens, fold=fold)
    sizes = Sizes(memory)
    for n_tokens in (4, 16, 48):
        sequence = memory.open()
        memory.run(Toy(), {sequence: [1] * n_tokens})
        assert sizes.of(n_tokens) == memory.private_bytes(sequence)


def test_budgets_of_two_small_pages_work() -> None:
    model = Toy(recurrent=False)
    engine = make_engine(model, 2 * private_bytes(model, 4))
    generations = [engine.submit([i], max_tokens=3) for i in range(2)]
    run_checked(engine)
    assert [g.finish_reason for g in generations] == ["length"] * 2


def test_what_can_never_fit_is_refused_at_once_and_touches_nothing() -> None:
    """A million tokens are refused by their number alone.

    No checkpoint is closed, nobody else notices, and the budget that the error names is enough.
    """
    model = Toy(recurrent=False)
    engine = make_engine(model, private_bytes(model, 100))
    engine.prefixes = PrefixCache(engine.memory, grid_tokens=8)
    known = engine.submit([7] * 40, max_tokens=2)
    run_checked(engine)
    n_before = engine.prefixes.stats().n_checkpoints
    first = engine.submit([1, 2, 3], max_tokens=20)
    for n_tokens in (400, 10**6):
        prompt = [4] * n_tokens
        with refused_by_number(n_tokens, 1 << 20) as caught:
            engine.submit(prompt, max_tokens=20)
    assert engine.load.total == 1 and engine.prefixes.stats().n_checkpoints == n_before > 0 and known.is_finished
    run_checked(engine)
    assert first.token_ids == decode_alone(model, [1, 2, 3], 20)
    larger = make_engine(model, make_memory(model).needed_bytes(400, max_tokens=24))
    larger.submit([4] * 400, max_tokens=1)
    assert [g.finish_reason for g in run_checked(larger)] == ["length"] and caught.value.needed > 10**6


def test_a_sequence_is_refused_what_it_cannot_hold_on_top() -> None:
    model = Toy()
    engine = make_engine(model, private_bytes(model, 100) + private_bytes(model, 1))
    sequence = engine.memory.open()
    engine.memory.run(model, {sequence: [1] * 80})
    engine.submit([1] * 10, sequence=sequence, max_tokens=1, keeps_sequence=True)
    run_checked(engine)
    with pytest.raises(CapacityError, match="can never hold"):
        engine.submit([1] * 90, sequence=sequence, max_tokens=1)
    assert sequence.length == 90 and not sequence.closed


def test_a_reply_that_outgrows_the_memory_keeps_what_it_said() -> None:
    model = Toy(recurrent=False)
    engine = make_engine(model, private_bytes(model, 100))
    generation = engine.submit([1], max_tokens=1000)
    run_checked(engine)
    assert generation.finish_reason == "error" and len(generation.token_ids) >= 90
    assert generation.token_ids == decode_alone(model, [1], len(generation.token_ids))
    assert engine.memory.usage().used_bytes == 0


def test_a_window_of_attention_lets_long_prompts_through_small_memories() -> None:
    model = Toy(recurrent=False, window=5)
    whole = Toy(recurrent=False).memory_spec  # Layer 0 sees everything, so only layer 2 forgets.
    assert whole != model.memory_spec
    engine = make_engine(model, int(1.2 * private_bytes(model, 200)), step_tokens=256)
    generation = engine.submit([i % VOCAB for i in range(190)], max_tokens=5)
    run_checked(engine)
    assert generation.token_ids == decode_alone(model, [i % VOCAB for i in range(190)], 5)


def test_the_important_are_let_in_first_and_leave_last() -> None:
    model = Toy(recurrent=False)
    engine = make_engine(model, int(2.6 * private_bytes(model, 80)))
    generations = [engine.submit([i], max_tokens=100, priority=i) for i in range(3)]
    finished = run_checked(engine)
    assert engine.stats.n_preempted > 0
    assert set(finished[:2]) == set(generations[1:]), "the least important one did not leave"
    engine = make_engine(model, max_running=1)
    generations = [engine.submit([i], max_tokens=3, priority=i) for i in range(3)]
    assert run_checked(engine) == generations[::-1]


def test_where_nothing_can_be_swapped_to_requests_wait_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HybridMemory, sequence: Sequence) -> None:
        raise CapacityError("no room in the host's memory", needed=1, free=0)

    monkeypatch.setattr(HybridMemory, "swap_out", refuse)
    model = Toy(recurrent=False)
    engine = make_engine(model, 2 * private_bytes(model, 100))
    generations = [engine.submit([i], max_tokens=70) for i in range(3)]
    run_checked(engine)
    assert engine.stats.n_preempted > 0 and engine.stats.n_swapped_in == 0
    for i, generation in enumerate(generations):
        assert generation.token_ids == decode_alone(model, [i], 70)


# The tests below are about fairness.


def test_a_long_prompt_takes_no_token_from_anybody(model: LanguageModel) -> None:
    engine = make_engine(model)
    replies = [engine.submit([i], max_tokens=40) for i in range(3)]
    engine.step()
    prompt = [i % model.memory_spec.vocab_size for i in range(300)]
    long = engine.submit(prompt, max_tokens=3)
    n_steps = 0
    while not long.token_ids:
        before = [len(g.token_ids) for g in replies]
        engine.step()
        assert [len(g.token_ids) for g in replies] == [n + 1 for n in before]
        n_steps += 1
    assert n_steps == -(-300 // 24), "the prompt did not get all tokens of a step"
    engine.run()
    assert long.token_ids == decode_alone(model, prompt, 3)


def test_short_prompts_do_not_wait_for_long_ones_nor_long_ones_for_ever() -> None:
    model = Toy()
    engine = make_engine(model, step_tokens=64, max_running=8)
    long = engine.submit([1] * 600, max_tokens=2)
    generator = random.Random(5)

    def arrive(n: int) -> None:  # There are always more requests than there is room for.
        while engine.load.waiting < 4 and not long.is_finished:
            engine.submit(draw_prompt(generator, 40, VOCAB), max_tokens=2)

    finished: list[Generation] = []
    for n in range(400):
        arrive(n)
        finished += engine.step()
        if long.is_finished:
            break
    assert long.is_finished and n < 110, (
        "of 8 who share a step 3 get a part of it, of 20 tokens or so: 600 tokens take 3 times 30 steps"
    )
    assert len(finished) > 20 and finished[0] is not long


# The tests below end generations at any time.


@few_cases
def test_cancellations_and_deadlines_at_any_time_free_everything(model: LanguageModel) -> None:
    now = 0.0
    generator = random.Random(6)
    engine = make_engine(model, 4 * private_bytes(model, 80), clock=lambda: now)
    outsider = engine.memory.open()
    engine.memory.run(model, {outsider: [1, 2, 3]})
    start_bytes = engine.memory.usage().used_bytes
    wanted = Wanted()

    def disturb(n: int) -> None:
        nonlocal now
        now += 1.0
        if n < 40 and generator.random() < 0.5:
            deadline_s = generator.choice([None, generator.uniform(1, 30)])
            wanted.extend(submit_some(engine, model, generator, 1, 60, 25, deadline_s=deadline_s))
        if wanted and generator.random() < 0.3:
            engine.cancel(generator.choice(wanted)[0])
            engine.memory.check()

    engine.submit([1], max_tokens=70)
    run_checked(engine, disturb)
    assert_as_alone(model, wanted)
    reasons = [generation.finish_reason for generation, *_ in wanted]
    assert set(reasons) == {"length", "cancelled", "deadline"}
    assert engine.memory.usage().used_bytes == start_bytes


def test_a_deadline_ends_who_waits_and_who_runs() -> None:
    now = 100.0
    engine = make_engine(Toy(), max_running=1, clock=lambda: now)
    runs, waits = engine.submit([1], max_tokens=50, deadline_s=3), engine.submit([2], max_tokens=50, deadline_s=1.5)
    finished: list[Generation] = []
    while not engine.is_idle:
        finished += engine.step()
        now += 1
    assert finished == [waits, runs]
    assert (runs.finish_reason, len(runs.token_ids)) == ("deadline", 3) and (waits.finish_reason, waits.token_ids) == (
        "deadline",
        [],
    )
    assert (runs.submitted_at, runs.first_token_at, runs.finished_at) == (100.0, 100.0, 103.0)


def test_cancel_frees_at_once_and_twice_is_once() -> None:
    told: list[tuple[str, str | None]] = []
    engine = make_engine(Toy())
    generation = engine.submit([1, 2], max_tokens=50, on_token=lambda g, piece: told.append((piece, g.finish_reason)))
    engine.step()
    assert engine.memory.usage().used_bytes > 0
    for _ in range(2):
        engine.cancel(generation)
        assert engine.is_idle and engine.memory.usage().used_bytes == 0
    assert generation.finish_reason == "cancelled" and told == [("", None), ("", "cancelled")]
    assert engine.step() == [generation] and engine.step() == []
    engine.cancel(make_engine(Toy()).submit([1]))  # This generation belongs to another engine, so nothing happens.


def test_callbacks_may_cancel_and_submit_but_not_step() -> None:
    engine = make_engine(Toy())
    more: list[Generation] = []
    errors: list[Exception] = []

    def hear(generation: Generation, piece: str) -> None:
        if len(generation.token_ids) == 3 and not more:
            engine.cancel(generation)
            assert not generation.is_finished, "not in the middle of a step"
            more.append(engine.submit([2], max_tokens=2))
            with pytest.raises(StepError, match="on_token") as caught:
                engine.step()
            errors.append(caught.value)

    generation = engine.submit([1], max_tokens=9, on_token=hear)
    run_checked(engine)
    assert (generation.finish_reason, len(generation.token_ids)) == ("cancelled", 3)
    assert more[0].finish_reason == "length" and len(errors) == 1


# The tests below are about parts that belong together.


def test_an_engine_is_made_of_what_belongs_together_or_not_at_all() -> None:
    model, memory = Toy(), make_memory(Toy())
    for prefixes, what in (
        (True, "prefixes=True; give PrefixCache"),
        (PrefixCache(make_memory(model)), "cache of another memory"),
    ):
        with pytest.raises(SpecError, match=what):
            Engine(model, memory, None, stop_ids=(), prefixes=prefixes)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="made for toy, not for toy; make it with"):
        Engine(Toy(recurrent=False), memory, None, stop_ids=())  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"holds torch.bfloat16 on cpu, toy runs in torch.float32 on cpu; make it with"):
        Engine(model, HybridMemory(model.memory_spec, dtype=torch.bfloat16), None, stop_ids=())  # type: ignore[arg-type]


def test_a_generation_that_has_ended_is_forgotten_whenever_its_deadline_is() -> None:
    """A generation with a far deadline must not keep the prompts of a day."""
    engine = make_engine(Toy())
    generations = [engine.submit([i], max_tokens=2, deadline_s=3600 + i % 2) for i in range(8)]
    jobs = weakref.WeakSet(scheduler_of(engine).jobs.values())
    engine.cancel(generations[3])
    run_checked(engine)
    gc.collect()
    assert not len(jobs)
    late = engine.submit([1], max_tokens=10**6, deadline_s=1e-9)
    run_checked(engine)
    assert late.finish_reason == "deadline"
