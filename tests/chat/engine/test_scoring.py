"""A prompt has the same scores as in a sequence alone, however it is split, preempted, forked or found in a cache."""

from __future__ import annotations

import random

import pytest
import torch

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.engine.output import Output
from hybridmem.chat.engine.scheduling import ALL_SCORED
from hybridmem.chat.engine.scoring import Scored
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.memory import BatchError, HybridMemory
from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.models import LanguageModel
from tests.chat.engines import draw_prompt, make_engine, make_memory, run_checked, scheduler_of
from tests.extent import few_cases

N_TOKENS = 70


def alone(model: LanguageModel, prompt: list[int]) -> torch.Tensor:
    """Return the log probabilities after each token of a prompt that is read at once."""
    memory = make_memory(model)
    with memory.step({memory.open(): prompt}, outputs="all") as step:
        return model(step).double().log_softmax(-1)


def assert_scored(model: LanguageModel, prompt: list[int], scored: list[Scored], start: int, n_top: int) -> None:
    rows_SV = alone(model, prompt)
    assert [each.token_id for each in scored] == prompt[start:]
    for i, each in enumerate(scored, start):
        row_V = rows_SV[i - 1]
        assert each.logprob == pytest.approx(float(row_V[prompt[i]]), abs=1e-4)
        assert each.rank == pytest.approx(1 + int((row_V > row_V[prompt[i]]).sum()), abs=1)
        assert [value for _, value in each.top] == pytest.approx(row_V.topk(n_top).values.tolist(), abs=1e-4)


@few_cases
@pytest.mark.parametrize("step_tokens", [8, 200])
def test_scores_are_those_of_a_sequence_alone(model: LanguageModel, step_tokens: int) -> None:
    """Prompts without scores, and replies, run beside it."""
    generator, engine = random.Random(1), make_engine(model, step_tokens=step_tokens, max_running=4)
    prompts = [draw_prompt(generator, n, model.memory_spec.vocab_size) for n in (N_TOKENS, 1, 2, 40)]
    plain = [engine.submit(prompt, max_tokens=5) for prompt in prompts]
    scored = [engine.submit(prompt, max_tokens=i, output=Output(prompt_logprobs=i)) for i, prompt in enumerate(prompts)]
    run_checked(engine)
    for i, (prompt, generation) in enumerate(zip(prompts, scored, strict=True)):
        assert generation.finish_reason == "length" and len(generation.token_ids) == i
        assert generation.token_ids == plain[i].token_ids[:i] and plain[i].prompt_logprobs == []
        assert_scored(model, prompt, generation.prompt_logprobs, 1, n_top=i)  # type: ignore[arg-type]


def test_a_cached_prefix_is_reused_up_to_the_first_scored_token(model: LanguageModel) -> None:
    engine = cached_engine(model)
    prompt = draw_prompt(random.Random(2), N_TOKENS, model.memory_spec.vocab_size)
    whole, start = Output(prompt_logprobs=2), 60
    for output in (Output(), whole, Output(prompt_logprobs=2, scored_from=start)):
        generation = engine.submit(prompt, max_tokens=1, output=output)
        run_checked(engine)
        assert generation.lookup is not None and generation.lookup.n_tokens == N_TOKENS
        if output is whole:
            assert generation.lookup.reused == 0 and generation.lookup.why == ALL_SCORED
        elif output.prompt_logprobs is not None:
            assert start - 12 <= generation.lookup.reused < start
        if output.prompt_logprobs is not None:
            assert_scored(model, prompt, generation.prompt_logprobs, output.scored_from, n_top=2)  # type: ignore[arg-type]


def cached_engine(model: LanguageModel) -> Engine:
    engine = make_engine(model, "16MiB")
    memory = engine.memory
    return Engine(model, memory, None, prefixes=PrefixCache(memory, grid_tokens=8), step_tokens=24, max_running=6)


def test_choices_of_a_scored_prompt_have_its_scores(model: LanguageModel) -> None:
    engine = make_engine(model)
    prompt = draw_prompt(random.Random(3), 30, model.memory_spec.vocab_size)
    samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(3)]
    choices = engine.submit_choices(prompt, samplings, max_tokens=3, output=Output(prompt_logprobs=0))
    run_checked(engine)
    assert engine.stats.n_forked > 0
    for choice in choices:
        assert_scored(model, prompt, choice.prompt_logprobs, 1, n_top=0)  # type: ignore[arg-type]


def test_prompts_that_give_way_are_scored_once(model: LanguageModel) -> None:
    """They are preempted in the middle, there is nowhere to swap them to, and they are computed again."""
    generator = random.Random(4)
    prompts = [draw_prompt(generator, N_TOKENS, model.memory_spec.vocab_size) for _ in range(3)]
    memory = HybridMemory(model.memory_spec, "4MiB", rollback_window=8, page_tokens=4, host_budget=1, poison=True)
    engine = Engine(model, memory, None, step_tokens=24, max_running=6)
    scored = [engine.submit(prompt, max_tokens=9, output=Output(prompt_logprobs=1)) for prompt in prompts]
    n_restarted = 0

    def give_way(n_step: int) -> None:
        nonlocal n_restarted
        if n_step % 3 == 2 and n_step < 20 and len(scheduler_of(engine).running) > 1:
            scheduler_of(engine).preempt()
            n_restarted += scheduler_of(engine).restart()

    run_checked(engine, give_way)
    assert n_restarted > 0
    for prompt, generation in zip(prompts, scored, strict=True):
        assert len(generation.token_ids) == 9
        assert_scored(model, prompt, generation.prompt_logprobs, 1, n_top=1)  # type: ignore[arg-type]


def test_wrong_options_are_named() -> None:
    with pytest.raises(BatchError, match=r"prompt_logprobs=21"):
        Output(prompt_logprobs=21)
    with pytest.raises(BatchError, match=r"scored_from=0"):
        Output(scored_from=0)
