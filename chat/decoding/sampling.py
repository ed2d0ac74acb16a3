"""Chooses the next token: greedily, or drawn from what transformers' logits processors leave."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from memory import BatchError, StepError
from memory.blocks.arguments import is_integer


@dataclass(frozen=True)
class Sampling:
    """Says how tokens are chosen. The defaults are greedy.

    Attributes:
        temperature: 0 takes the most likely token, whatever top_k and top_p say.
        top_k: draw among the k most likely tokens only.
        top_p: draw among the most likely tokens whose probabilities sum to p.
        repetition_penalty: above 1, tokens that occurred already, in the prompt or since, become less likely; greedy or
            not.
        seed: draws depend on it, on the logits and on how many tokens were drawn before, on nothing else. None: another
            one each time.
    Raises:
        BatchError: naming the option and its value.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check(
            "temperature",
            self.temperature,
            _is_number(self.temperature) and self.temperature >= 0,
            "0 for greedy, or more",
        )
        _check(
            "top_k",
            self.top_k,
            self.top_k is None or (is_integer(self.top_k) and self.top_k >= 1),
            "an integer >= 1, or None for all",
        )
        _check(
            "top_p",
            self.top_p,
            self.top_p is None or (_is_number(self.top_p) and 0 < self.top_p <= 1),
            "0 < p <= 1, or None for all",
        )
        penalty = self.repetition_penalty
        _check(
            "repetition_penalty", penalty, _is_number(penalty) and penalty > 0, "a number above 0; 1 changes nothing"
        )
        _check(
            "seed", self.seed, self.seed is None or is_integer(self.seed), "an integer, or None for a new one each time"
        )

    @property
    def is_greedy(self) -> bool:
        """True if nothing is drawn. A repetition penalty may still change which token is the most likely one."""
        return self.temperature == 0

    @property
    def is_plain(self) -> bool:
        """True if the choice is the argmax of the logits as they are."""
        return self.is_greedy and self.repetition_penalty == 1


def check_sampling(sampling: object) -> None:
    """Raise BatchError unless this is a `Sampling`."""
    if not isinstance(sampling, Sampling):
        meant = (
            f"**{sampling!r}"
            if isinstance(sampling, dict)
            else f"temperature={sampling if _is_number(sampling) else 0.7}"
        )
        raise BatchError(f"sampling={sampling!r}; give a chat.sampling.Sampling, such as Sampling({meant})")


class Sampler:
    """Chooses the tokens of one sequence, one after the other.

    A draw is a function of the seed, the logits and the number of tokens so far: choosing again after a step that
    failed gives the same token, whatever the other sequences of the batch are.

    Args:
        prompt_ids: all tokens that the sequence holds, for the repetition penalty.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Iterable[int] = ()) -> None:
        self.sampling = sampling
        self._key = (secrets.randbits(64) if sampling.seed is None else sampling.seed) % 2**64
        self._n_chosen = 0
        self._penalty: RepetitionPenaltyLogitsProcessor | None = None
        self._seen: Tensor | None = None  # (1, n) distinct token ids
        if sampling.repetition_penalty != 1:
            self._penalty = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))
            self._seen = torch.tensor(sorted(set(prompt_ids)), dtype=torch.int64)[None]
        self._warpers: list[Callable[[Tensor | None, Tensor], Tensor]] = []
        if not sampling.is_greedy:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k is not None:
                self._warpers.append(TopKLogitsWarper(int(sampling.top_k)))
            if sampling.top_p is not None and sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(float(sampling.top_p)))

    def choose(self, logits_V: Tensor) -> int:
        """Choose the next token and count it.
        Raises StepError, with nothing changed, if no logit is finite or one is NaN.
        """
        token_id = self.draw(logits_V)
        self.add(token_id)
        return token_id

    def draw(self, logits_V: Tensor) -> int:
        """Return what `choose` would return; nothing changes. Cost: O(V), and a sort of V numbers with top_p."""
        scores_1V = self._scores(logits_V)
        if not bool(torch.isfinite(scores_1V.max())):
            raise StepError("the model's logits are not finite; give it a wider dtype, such as float32 or bfloat16")
        if self.sampling.is_greedy:
            return int(scores_1V.argmax())
        cumulative_V = _softmax(scores_1V).double().cumsum(-1)
        total = float(cumulative_V[-1])
        uniform = float(np.random.Generator(np.random.Philox(key=self._key, counter=self._n_chosen)).random())
        # The token is the first whose cumulative probability is beyond the point. The point lies below the total, or
        # a token that was ruled out could be chosen.
        point = torch.tensor(
            [min(uniform * total, math.nextafter(total, 0))], dtype=torch.float64, device=cumulative_V.device
        )
        return int(torch.searchsorted(cumulative_V, point, right=True))

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Return (V,) float32: the probability of each token to be chosen next. Greedy: 1 for one token."""
        scores_1V = self._scores(logits_V)
        if self.sampling.is_greedy:
            return torch.nn.functional.one_hot(scores_1V[0].argmax(), scores_1V.shape[1]).float()
        return _softmax(scores_1V)

    def add(self, token_id: int) -> None:
        """Count a token that was chosen."""
        self._n_chosen += 1
        if self._seen is not None and not bool((self._seen == token_id).any()):
            self._seen = torch.cat([self._seen, torch.tensor([[token_id]], device=self._seen.device)], dim=1)

    def _scores(self, logits_V: Tensor) -> Tensor:
        """Return (1, V) float32 scores after all processors, in the order of transformers' `generate`."""
        scores_1V = logits_V.detach().float()[None]
        if self._penalty is not None and self._seen is not None and self._seen.numel():
            self._seen = self._seen.to(scores_1V.device)
            scores_1V = self._penalty(self._seen, scores_1V)
        # A shift does not change probabilities; without one, a temperature close to 0 would make large logits infinite.
        shifted_1V = scores_1V - scores_1V.max() if self._warpers else scores_1V
        for warp in self._warpers:
            shifted_1V = warp(None, shifted_1V)
        return shifted_1V


def _softmax(scores_1V: Tensor) -> Tensor:
    return torch.softmax(scores_1V[0], dim=-1)


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float | np.integer | np.floating)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _check(option: str, value: object, is_fine: bool, wanted: str) -> None:
    if not is_fine:
        raise BatchError(f"{option}={value!r}; give {wanted}")
