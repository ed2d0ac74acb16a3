"""A smaller model drafts in the engine. Replies are the same with its drafts, and its sequences follow the jobs."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from hybridmem.chat.engine.draft_models import ModelDrafter
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.chat.engine.output import Output
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.sampling.grammar import Grammars
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.server.metrics import Metrics
from hybridmem.chat.server.usage import usage_of
from hybridmem.memory import HybridMemory, SpecError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import LanguageModel
from tests.chat.engine.test_drafting import Repeating
from tests.chat.engines import draw_sampling, make_memory, run_checked
from tests.extent import few_cases, only_in_long, pick
from tests.toy import Toy


def make_drafter(budget: str = "4MiB", *, caches: bool = False, **options: object) -> ModelDrafter:
    """Return a draft model that lacks attention, so that it is right only now and then."""
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


@few_cases
@pytest.mark.parametrize("seed", range(pick(3, 6)))
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


def follow(drafter: ModelDrafter, *, budget: str = "4MiB", **options: Any) -> Engine:
    model = Repeating()
    speculation = Speculation(adapts=False, drafter=drafter)
    return Engine(model, make_memory(model, budget), None, stop_ids=(), speculation=speculation, **options)


def test_a_model_that_drafts_for_itself_is_always_right_drawn_or_not() -> None:
    """A drafter draws with the random numbers of the reply. So where both models agree, no draft is rejected."""
    model = Repeating()
    engine = follow(ModelDrafter(model, make_memory(model)))
    samplings = [
        Sampling(1.5, seed=3), Sampling(), Sampling(1, repetition_penalty=1.4, seed=5), Sampling(0.7, top_k=5, seed=9),
    ]  # fmt: skip
    generations = [engine.submit([1, 2, 3], max_tokens=60, sampling=sampling) for sampling in samplings]
    engine.run()
    assert engine.stats.n_accepted == engine.stats.n_drafted > 150
    assert all(generation.n_accepted > 30 for generation in generations)
    assert engine.stats.n_steps < 20, "a step brings nine tokens"


@only_in_long
def test_drawn_tokens_have_the_distribution_of_plain_sampling() -> None:
    """A chi-square test compares the sixth token of replies without a seed.

    The long form does so at three temperatures.
    """
    for temperature in (1.0, 0.5, 1.5)[: pick(1, 3)]:
        counts = []
        for drafter in (None, make_drafter()):
            model = Repeating()
            speculation = Speculation(adapts=False, drafter=drafter)
            engine = Engine(model, make_memory(model), None, stop_ids=(), max_running=40, speculation=speculation)
            sampling = [Sampling(temperature)] * 600
            counts.append(Counter(g.token_ids[5] for g in submit(engine, sampling)))
            if drafter is not None:
                assert 0 < engine.stats.n_accepted < engine.stats.n_drafted
        a, b = counts
        tokens = [token for token in {*a, *b} if a[token] + b[token] >= 10]
        chi_square = sum((a[token] - b[token]) ** 2 / (a[token] + b[token]) for token in tokens)
        assert len(tokens) > 1 and chi_square < len(tokens) + 4 * (2 * len(tokens)) ** 0.5


def submit(engine: Engine, samplings: list[Sampling]) -> list[Generation]:
    generations = engine.submit_choices([1, 2, 3], samplings, max_tokens=8)
    engine.run()
    return generations


def test_what_drafts_were_worth_is_counted_by_place_and_by_reply() -> None:
    model = Repeating()
    speculation = Speculation(adapts=False)
    engine = Engine(model, make_memory(model), None, stop_ids=(), speculation=speculation)
    said = engine.submit([1, 2, 3], max_tokens=40)
    engine.run()
    assert engine.stats.n_drafts == 0 and engine.stats.saved_seconds == 0
    drafted = [engine.submit([1, 2, 3], max_tokens=40, prediction=said.token_ids[:20] + [0] * 9) for _ in range(2)]
    engine.run()
    stats = engine.stats
    assert sum(g.n_drafts for g in drafted) == stats.n_drafts == stats.drafted_at[0] > 0
    assert sum(stats.drafted_at.values()) == stats.n_drafted > stats.n_accepted == sum(stats.accepted_at.values())
    assert stats.accepted_at[0] >= stats.accepted_at[7] > 0
    assert stats.saved_seconds == pytest.approx(sum(g.saved_seconds for g in drafted)) != 0
    lines = Metrics(engine, "toy").render().decode()
    assert f'hybrid_memory_accepted_tokens_by_position_total{{position="7"}} {stats.accepted_at[7]}.0' in lines
    assert f'vllm:spec_decode_num_drafts_total{{model_name="toy"}} {stats.n_drafts}.0' in lines
    usage = usage_of(drafted[:1], drafted[:1])["hybrid_memory"]
    assert (usage["drafts"], usage["accepted_tokens"]) == (drafted[0].n_drafts, drafted[0].n_accepted)


def test_choices_share_the_draft_models_prompt() -> None:
    """The draft model is fed the prompt once. Its sequence is forked when the model's is."""
    drafter = make_drafter()
    fed, advance = list[int](), drafter.memory.step
    drafter.memory.step = lambda requests, **o: fed.extend(len(ids) for _, ids in requests) or advance(requests, **o)  # type: ignore[method-assign, func-returns-value]
    engine = follow(drafter)
    engine.submit_choices([i % 7 for i in range(50)], [Sampling(1.0, seed=i) for i in range(4)], max_tokens=20)
    run_checked(engine)
    assert sum(n >= 40 for n in fed) == 1 and engine.stats.n_accepted > 0


def test_a_preempted_job_takes_its_draft_sequence_along() -> None:
    drafter = make_drafter()
    engine = follow(drafter, budget="24KiB", max_running=3, step_tokens=40)
    seen = set[tuple[bool, bool]]()
    generations = [engine.submit([i, 2, 3] * 9, max_tokens=60) for i in range(4)]

    def look(_: int) -> None:
        drafter.memory.check()
        seen.add((engine.load.preempted > 0, any(sequence.is_swapped for sequence in drafter.memory.sequences)))

    run_checked(engine, look)
    assert engine.stats.n_preempted and (True, True) in seen and (False, False) in seen
    assert [g.finish_reason for g in generations] == ["length"] * 4 and not drafter.memory.sequences


@only_in_long
def test_a_draft_model_without_room_leaves_jobs_out() -> None:
    drafter = make_drafter("6KiB")
    engine = follow(drafter)
    generations = [engine.submit([i, 2, 3], max_tokens=40, sampling=Sampling(1.0, seed=i)) for i in range(5)]
    run_checked(engine)
    plain = follow(make_drafter())
    others = [plain.submit([i, 2, 3], max_tokens=40, sampling=Sampling(1.0, seed=i)) for i in range(5)]
    plain.run()
    assert [g.token_ids for g in generations] == [g.token_ids for g in others]
    assert 0 < sum(g.n_drafted for g in generations) < sum(g.n_drafted for g in others)


def test_a_drafter_that_cannot_work_is_refused() -> None:
    small = Repeating(attention=False)
    with pytest.raises(SpecError, match="rollback_window=0"):
        ModelDrafter(small, make_memory(small, rollback_window=0))
    with pytest.raises(SpecError, match="made for"):
        ModelDrafter(Toy(recurrent=False), make_memory(small))
    model = Repeating()
    memory = make_memory(model)
    with pytest.raises(SpecError, match="a memory of its own"):
        Engine(model, memory, None, speculation=Speculation(drafter=ModelDrafter(model, memory)))
    with pytest.raises(SpecError, match="rollback window"):
        no_window = make_memory(model, rollback_window=0)
        Engine(model, no_window, None, speculation=Speculation(drafter=make_drafter()))


def test_grammars_stop_strings_and_log_probabilities_are_those_without_drafts(
    embedded: LanguageModel, tokenizer: Tokenizer
) -> None:
    """The draft model keeps to the grammar of the reply, so that what it drafts can be chosen."""
    pattern = r"(yes|no)( (yes|no)){11}"
    grammar = Grammars(tokenizer, len(tokenizer), (tokenizer.eos_token_id,)).regex(pattern)
    prompt = tokenizer.encode("<|bos|><|user|>My cat is called Zoe.<|end|><|assistant|>")
    small = HybridMemory(embedded.memory_spec, "16MiB", rollback_window=16)
    told = []
    for drafter in (None, ModelDrafter(embedded, small, tokenizer)):
        engine = Engine(
            embedded, HybridMemory(embedded.memory_spec, "16MiB", rollback_window=16), tokenizer,
            speculation=Speculation(adapts=False, drafter=drafter),
        )  # fmt: skip
        generations = [
            engine.submit(prompt, output=Output(grammar=grammar), sampling=Sampling(1.5, seed=3)),
            engine.submit(prompt, stop=["not"]),
            engine.submit(prompt, output=Output(logprobs=2), sampling=Sampling(0.8, seed=4), max_tokens=20),
        ]
        run_checked(engine)
        told.append(generations)
    for plain, drafted in zip(*told, strict=True):
        assert (plain.text, plain.token_ids, plain.stopped_by) == (drafted.text, drafted.token_ids, drafted.stopped_by)
        assert drafted.n_accepted >= 2
    plain, drafted = told[0][2], told[1][2]
    assert [c.token_id for c in plain.logprobs] == [c.token_id for c in drafted.logprobs]
    assert [c.logprob for c in plain.logprobs] == pytest.approx([c.logprob for c in drafted.logprobs], abs=1e-3)
