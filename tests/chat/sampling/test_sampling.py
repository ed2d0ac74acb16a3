"""Tokens are drawn as often as their probabilities say, a seed decides all draws, and wrong options are refused."""

from __future__ import annotations

import re
from copy import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybridmem.chat.sampling.sampler import Sampler, choose_rows, score_rows
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.memory import BatchError, StepError
from tests.extent import few_cases

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 1.0, -0.5])


def softmax_of(kept: list[int], temperature: float = 1.0) -> Tensor:
    """Return the softmax (8,) of `LOGITS` with only these tokens left."""
    expected = torch.zeros(8)
    expected[kept] = torch.softmax(LOGITS[kept] / temperature, 0)
    return expected


@few_cases
@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), softmax_of(list(range(8)))),
        (Sampling(temperature=0.4), softmax_of(list(range(8)), 0.4)),
        (Sampling(temperature=2, top_k=3), softmax_of([0, 3, 6], 2.0)),
        (Sampling(temperature=1.0, top_k=99), softmax_of(list(range(8)))),
        # The two most likely tokens have the probabilities 0.42 and 0.26.
        (Sampling(temperature=1.0, top_p=0.6), softmax_of([0, 3])),
        (Sampling(temperature=1.0, top_p=0.01), softmax_of([0])),
        (Sampling(temperature=1.0, top_k=4, top_p=1.0), softmax_of([0, 3, 6, 2])),
        (Sampling(), softmax_of([0])),
    ],
)
def test_draws_are_as_frequent_as_probabilities_say(sampling: Sampling, expected: Tensor) -> None:
    n_draws = 2000
    sampler = Sampler(Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed=5))
    assert torch.allclose(sampler.probabilities(LOGITS), expected, atol=1e-6)
    counts = torch.bincount(torch.tensor([sampler.choose(LOGITS) for _ in range(n_draws)]), minlength=8).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    means = expected[possible].double() * n_draws
    chi_square = float(((counts[possible] - means) ** 2 / means).sum())
    # With 7 degrees of freedom, chi square exceeds 30 for one seed in 10,000.
    assert chi_square < 30, f"{counts.tolist()} instead of {means.tolist()}"


def test_a_temperature_close_to_zero_is_greedy() -> None:
    sampler = Sampler(Sampling(temperature=1e-40, seed=1))
    assert {sampler.choose(1000 * LOGITS) for _ in range(20)} == {0}


def test_the_seed_decides_and_nothing_else() -> None:
    def draw(seed: int, n_draws: int = 50) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.5, seed=seed))
        torch.rand(3)  # The global generator has no effect.
        return [sampler.choose(LOGITS) for _ in range(n_draws)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(-1) == draw(-1)
    samplers = [Sampler(Sampling(temperature=1.5)) for _ in range(2)]
    assert [samplers[0].choose(LOGITS) for _ in range(50)] != [samplers[1].choose(LOGITS) for _ in range(50)]


def test_drawing_again_gives_the_same_token_until_one_is_added() -> None:
    sampler, other = (Sampler(Sampling(temperature=1.5, repetition_penalty=1.3, seed=3), [1]) for _ in range(2))
    for _ in range(30):
        drawn = [sampler.draw(LOGITS) for _ in range(3)]
        assert len(set(drawn)) == 1
        sampler.add(drawn[0])
        assert other.choose(LOGITS) == drawn[0]


def test_draws_are_the_numbers_of_one_stream_of_philox() -> None:
    sampler = Sampler(Sampling(temperature=1.0, seed=5))
    drawn = []
    for _ in range(200):
        drawn.append(sampler.uniform())
        sampler.add(0)
    assert drawn == np.random.Generator(np.random.Philox(key=5)).random(200).tolist()


def test_repetition_penalty_counts_the_prompt_and_what_was_chosen_once_each() -> None:
    sampler = Sampler(Sampling(temperature=1.0, repetition_penalty=2.0, seed=0), [0, 1, 1])
    penalised = LOGITS.clone()
    penalised[0], penalised[1] = 1.0, -2.0  # Positive scores are divided, and negative ones multiplied.
    assert torch.allclose(sampler.probabilities(LOGITS), torch.softmax(penalised, 0), atol=1e-6)
    for _ in range(2):
        sampler.add(3)
    penalised[3] = 0.75
    assert torch.allclose(sampler.probabilities(LOGITS), torch.softmax(penalised, 0), atol=1e-6)


def test_a_penalty_changes_greedy_choices_too() -> None:
    sampler = Sampler(Sampling(repetition_penalty=1.5))
    # Token 0 has 2.0 at first. Then the 1.5 of token 3 is more than 2.0 / 1.5. Then 1.5 becomes 1.0, and token 0 is
    # first again.
    assert [sampler.choose(LOGITS) for _ in range(3)] == [0, 3, 0]
    assert not Sampling(repetition_penalty=1.5).is_plain and Sampling().is_plain


def test_scores_are_those_of_transformers_processors() -> None:
    """Transformers changes one row after the other.

    This library changes many rows together, with all processors at once.
    """
    generator = torch.Generator().manual_seed(0)
    logits_SV = torch.randn(6, 50, generator=generator) * 3
    options = [(0.7, 5, 0.9, 1.3, 0.0), (1.5, None, 0.5, 1.0, 0.1), (0.2, 50, None, 0.8, 0.0), (1.0, 3, 1.0, 2.0, 0.3)]
    options += [(1.0, None, None, 1.0, 0.0), (2.0, 99, 0.99, 1.1, 0.02)]
    prompts = [torch.randint(50, (12,), generator=generator).tolist() for _ in options]
    samplers = [
        Sampler(Sampling(t, k, p, r, min_p=m), prompt) for (t, k, p, r, m), prompt in zip(options, prompts, strict=True)
    ]
    found_SV = score_rows(logits_SV, samplers).softmax(-1)
    for (t, k, p, r, m), prompt, logits_V, found_V in zip(options, prompts, logits_SV, found_SV, strict=True):
        warpers = [RepetitionPenaltyLogitsProcessor(r), TemperatureLogitsWarper(t)]
        warpers += [TopKLogitsWarper(k)] if k else []
        warpers += [TopPLogitsWarper(p)] if p else []
        scores_1V = LogitsProcessorList([*warpers, MinPLogitsWarper(m)])(torch.tensor([prompt]), logits_V[None])
        assert torch.allclose(found_V, scores_1V[0].softmax(-1), atol=1e-6)
        assert torch.equal(found_V > 0, scores_1V[0] > -torch.inf)


def test_a_row_is_chosen_as_if_it_were_alone() -> None:
    logits_SV = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    samplings = [
        Sampling(1.0, seed=1), Sampling(), Sampling(0.5, 7, 0.9, 1.2, 4, min_p=0.05),
        Sampling(presence_penalty=1.0, frequency_penalty=0.5), Sampling(1.0, seed=2, logit_bias={3: 5.0}),
    ]  # fmt: skip
    together, alone = ([Sampler(sampling, [1, 2, 3]) for sampling in samplings] for _ in range(2))
    for n in range(20):
        rows_SV = logits_SV.roll(n, 1)
        chosen = choose_rows(rows_SV, together)
        for sampler, token_id in zip(together, chosen, strict=True):
            assert isinstance(token_id, int)
            sampler.add(token_id)
        assert chosen == [sampler.choose(row) for sampler, row in zip(alone, rows_SV, strict=True)]


def test_presence_and_frequency_count_what_was_chosen_and_nothing_else() -> None:
    sampler = Sampler(Sampling(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25, seed=0), [0, 1])
    for token_id in (3, 3, 6):
        sampler.add(token_id)
    expected = LOGITS.clone()
    expected[3], expected[6] = 1.5 - 0.5 - 2 * 0.25, 1.0 - 0.5 - 0.25
    assert torch.allclose(sampler.probabilities(LOGITS), torch.softmax(expected, 0), atol=1e-6)


def test_bias_forbids_and_forces() -> None:
    assert Sampler(Sampling(logit_bias={0: -100.0})).choose(LOGITS) == 3
    assert Sampler(Sampling(logit_bias={4: 100.0})).choose(LOGITS) == 4


def test_an_end_token_waits_for_min_tokens_and_becomes_likelier_by_decay() -> None:
    sampler = Sampler(Sampling(min_tokens=2), stop_ids=(0,))
    assert [sampler.choose(LOGITS) for _ in range(3)] == [3, 3, 0]
    decaying = Sampler(Sampling(length_decay=(2, 3.0)), stop_ids=(6,))
    assert [decaying.choose(LOGITS) for _ in range(5)] == [0, 0, 0, 6, 6]  # 1.0 times 3 is above 2.0.
    waiting = Sampler(Sampling(length_decay=(1, 3.0), min_tokens=4), stop_ids=(6,))
    assert [waiting.choose(LOGITS) for _ in range(5)] == [0, 0, 0, 0, 6]


def test_a_copy_draws_the_same_and_counts_for_itself() -> None:
    sampler = Sampler(Sampling(1.2, repetition_penalty=1.4, frequency_penalty=0.5, seed=9), [1])
    ahead = copy(sampler)
    drawn = [ahead.choose(LOGITS) for _ in range(5)]
    assert [sampler.choose(LOGITS) for _ in range(5)] == drawn


def test_logits_of_any_dtype_are_left_as_they_were() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = LOGITS.to(dtype)
        Sampler(Sampling(temperature=0.7, top_k=2, top_p=0.9, repetition_penalty=1.2, seed=0), [0, 2]).choose(logits)
        assert torch.equal(logits, LOGITS.to(dtype))


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, seed=0), Sampling(temperature=1.0, top_k=3, top_p=0.5)]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(sampling: Sampling, bad: float) -> None:
    logits = LOGITS.clone()
    logits[4] = bad
    with pytest.raises(StepError, match="finite"):
        Sampler(sampling).choose(logits)
    with pytest.raises(StepError, match="finite"):
        Sampler(sampling).choose(torch.full((8,), float("-inf")))
    logits[4] = float("-inf")  # A token that is ruled out is no error.
    assert Sampler(sampling).choose(logits) != 4


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), "1", None, True)),
        *(("top_k", value) for value in (0, -1, 1.5, "3", True)),
        *(("top_p", value) for value in (0, -0.2, 1.1, float("nan"), "0.5")),
        *(("repetition_penalty", value) for value in (0, -1, float("inf"), None)),
        *(("seed", value) for value in (1.5, "0", True)),
        *(("min_p", value) for value in (-0.1, 1.1, None)),
        *(("presence_penalty", value) for value in (float("nan"), "1")),
        *(("frequency_penalty", value) for value in (float("inf"), None)),
        *(("min_tokens", value) for value in (-1, 1.5)),
        *(("length_decay", value) for value in ((1,), (1, 0.5), 3)),
        *(("logit_bias", value) for value in ({1: "a"}, {-1: 2.0}, 7)),
    ],
)
def test_options_that_cannot_work_are_refused(option: str, value: Any) -> None:
    with pytest.raises(BatchError, match=re.escape(f"{option}={value!r}; give ")):
        Sampling(**{option: value})
