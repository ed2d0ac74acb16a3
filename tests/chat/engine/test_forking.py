"""Several replies share one prompt. It is computed once, and each reply is what it would be alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hybridmem.chat.engine.engine import Engine, Generation, Sampling
from hybridmem.chat.prompts import Tokenizer
from hybridmem.memory import BatchError
from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.models import LanguageModel
from tests.chat.engines import choose_alone, draw_prompt, make_engine, make_memory, private_bytes, run_checked
from tests.extent import few_cases
from tests.toy import VOCAB, Toy

PROMPT = draw_prompt(random.Random(1), 60, VOCAB)
SAMPLINGS = [Sampling(), *(Sampling(temperature=1.0, seed=i) for i in range(5))]


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


def submit(engine: Engine, **options: Any) -> list[Generation]:
    return engine.submit_choices(PROMPT, SAMPLINGS, **{"max_tokens": 7, **options})


def assert_each_as_alone(model: Any, choices: list[Generation]) -> None:
    for choice, sampling in zip(choices, SAMPLINGS, strict=True):
        assert choice.finish_reason == "length" and len(choice.token_ids) == 7
        assert choice.token_ids == choose_alone(model, PROMPT, choice.token_ids, sampling)


@few_cases
@pytest.mark.parametrize("max_running", [2, 6])
def test_the_prompt_is_computed_once(model: LanguageModel, max_running: int) -> None:
    prompt = [token % model.memory_spec.vocab_size for token in PROMPT]
    engine = make_engine(model, max_running=max_running)
    choices = engine.submit_choices(prompt, SAMPLINGS, max_tokens=7)
    run_checked(engine)
    assert [choice.choice for choice in choices] == list(range(6))
    for choice, sampling in zip(choices, SAMPLINGS, strict=True):
        assert choice.token_ids == choose_alone(model, prompt, choice.token_ids, sampling)
    assert len({tuple(choice.token_ids) for choice in choices}) > 1
    assert engine.stats.n_fed == len(prompt) + 6 * 6 and engine.stats.n_forked == 5 * len(prompt)
    assert engine.memory.usage().used_bytes == 0


def test_with_a_prefix_cache_what_it_has_is_computed_by_none(toy: Toy) -> None:
    memory = make_memory(toy)
    engine = Engine(toy, memory, None, prefixes=PrefixCache(memory, grid_tokens=16), step_tokens=24, max_running=6)  # type: ignore[arg-type]
    for n_fed in (len(PROMPT), 1):
        before = engine.stats.n_fed
        choices = submit(engine)
        run_checked(engine)
        assert_each_as_alone(toy, choices)
        assert engine.stats.n_fed - before == n_fed + 6 * 6
        assert all(choice.lookup is choices[0].lookup is not None for choice in choices)


@pytest.mark.parametrize("n_steps", [0, 1, 2, 4])
def test_choices_go_on_without_the_one_that_computes_their_prompt(toy: Toy, n_steps: int) -> None:
    engine = make_engine(toy)
    first, *others = submit(engine)
    for _ in range(n_steps):
        engine.step()
    engine.cancel(first)
    run_checked(engine)
    assert first.finish_reason == "cancelled"
    for choice, sampling in zip(others, SAMPLINGS[1:], strict=True):
        assert choice.token_ids == choose_alone(toy, PROMPT, choice.token_ids, sampling) and len(choice.token_ids) == 7
    # The choice that computed the prompt was cancelled, so these prompt tokens were fed in vain.
    n_in_vain = 24 * n_steps if n_steps < 3 else 0
    assert engine.stats.n_fed <= len(PROMPT) + n_in_vain + 6 * 6


def test_choices_for_which_there_is_no_room_wait(toy: Toy) -> None:
    engine = make_engine(toy, 3 * private_bytes(toy, len(PROMPT) + 8))
    choices = submit(engine)
    run_checked(engine)
    assert_each_as_alone(toy, choices)


def test_nothing_but_the_prompt_is_wanted(toy: Toy) -> None:
    engine = make_engine(toy)
    choices = submit(engine, max_tokens=0)
    run_checked(engine)
    assert {choice.finish_reason for choice in choices} == {"length"} and engine.stats.n_fed == len(PROMPT)


def test_choices_end_together_at_a_deadline_and_report_once(toy: Toy) -> None:
    now, reported = [0.0], set[int]()
    engine = make_engine(toy, clock=lambda: now[0])
    choices = submit(
        engine, deadline_s=1.0, max_tokens=50, reports_prefill=True,
        on_token=lambda g, _: None if g.token_ids else reported.add(g.choice),
    )  # fmt: skip
    for _ in range(6):
        engine.step()
    assert reported == {0} and all(choice.token_ids for choice in choices)
    now[0] = 2.0
    run_checked(engine)
    assert {choice.finish_reason for choice in choices} == {"deadline"}


@pytest.mark.parametrize(("samplings", "options"), [([], {}), (SAMPLINGS, {"sampling": Sampling()}), ([1], {})])
def test_wrong_requests_submit_none(toy: Toy, samplings: Any, options: dict[str, Any]) -> None:
    engine = make_engine(toy)
    with pytest.raises(BatchError, match="sampling"):
        engine.submit_choices(PROMPT, samplings, **options)
    with pytest.raises(BatchError, match="colour"):
        engine.submit_choices(PROMPT, SAMPLINGS, colour=1)
    assert engine.is_idle


def test_texts_of_choices(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    engine = Engine(embedded, make_memory(embedded, "16MiB"), tokenizer)
    ids = tokenizer.encode("<|bos|><|user|>My cat is called Zoe.<|end|><|assistant|>")
    pieces = ["", ""]

    def hear(generation: Generation, piece: str) -> None:
        pieces[generation.choice] += piece

    engine.submit_choices(ids, [Sampling(), Sampling()], stop="noted", on_token=hear)
    run_checked(engine)
    assert pieces == ["Okay, ", "Okay, "]
