"""Sampling: what is drawn and how often, that a seed says it all, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from chat.decoding.sampling import Sampler, Sampling
from memory import BatchError, StepError

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 1.0, -0.5])


def softmax_of(kept: list[int], temperature: float = 1.0) -> Tensor:
    """(8,) of `LOGITS` with only these tokens left."""
    expected = torch.zeros(8)
    expected[kept] = torch.softmax(LOGITS[kept] / temperature, 0)
    return expected


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), softmax_of(list(range(8)))),
        (Sampling(temperature=0.4), softmax_of(list(range(8)), 0.4)),
        (Sampling(temperature=2, top_k=3), softmax_of([0, 3, 6], 2.0)),
        (Sampling(temperature=1.0, top_k=99), softmax_of(list(range(8)))),
        # probabilities 0.42 and 0.26 of the two most likely ones
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
    # 7 degrees of freedom: beyond 30 once in 10,000 seeds
    assert chi_square < 30, f"{counts.tolist()} instead of {means.tolist()}"


def test_a_temperature_close_to_zero_is_greedy() -> None:
    sampler = Sampler(Sampling(temperature=1e-40, seed=1))
    assert {sampler.choose(1000 * LOGITS) for _ in range(20)} == {0}


def test_the_seed_decides_and_nothing_else() -> None:
    def draw(seed: int, n_draws: int = 50) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.5, seed=seed))
        torch.rand(3)  # the global generator has no say
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


def test_repetition_penalty_counts_the_prompt_and_what_was_chosen_once_each() -> None:
    sampler = Sampler(Sampling(temperature=1.0, repetition_penalty=2.0, seed=0), [0, 1, 1])
    penalised = LOGITS.clone()
    penalised[0], penalised[1] = 1.0, -2.0  # positive ones are divided, negative ones multiplied
    assert torch.allclose(sampler.probabilities(LOGITS), torch.softmax(penalised, 0), atol=1e-6)
    for _ in range(2):
        sampler.add(3)
    penalised[3] = 0.75
    assert torch.allclose(sampler.probabilities(LOGITS), torch.softmax(penalised, 0), atol=1e-6)


def test_a_penalty_changes_greedy_choices_too() -> None:
    sampler = Sampler(Sampling(repetition_penalty=1.5))
    # 2.0; then 1.5 beats 2.0 / 1.5; then 1.5 is 1.0 and they are in order
    assert [sampler.choose(LOGITS) for _ in range(3)] == [0, 3, 0]
    assert not Sampling(repetition_penalty=1.5).is_plain and Sampling().is_plain


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
    logits[4] = float("-inf")  # a token that is ruled out is no error
    assert Sampler(sampling).choose(logits) != 4


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), "1", None, True)),
        *(("top_k", value) for value in (0, -1, 1.5, "3", True)),
        *(("top_p", value) for value in (0, -0.2, 1.1, float("nan"), "0.5")),
        *(("repetition_penalty", value) for value in (0, -1, float("inf"), None)),
        *(("seed", value) for value in (1.5, "0", True)),
    ],
)
def test_options_that_cannot_work_are_refused(option: str, value: Any) -> None:
    with pytest.raises(BatchError, match=f"{option}={value!r}; give ".replace("(", r"\(")):
        Sampling(**{option: value})
