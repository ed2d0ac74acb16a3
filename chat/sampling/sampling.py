"""Defines the options by which the next token is chosen, greedily or by a draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridmem.memory import BatchError
from hybridmem.memory.blocks import is_integer


@dataclass(frozen=True)
class Sampling:
    """Says how tokens are chosen. By default, the likeliest token is chosen (greedy).

    Scores are changed in this order: repetition penalty, presence and frequency penalties, logit bias, length decay,
    tokens that are not allowed, temperature, top_k, top_p, min_p. Penalties, bias and decay change greedy choices too.

    Attributes:
        temperature: 0 takes the most likely token, whatever top_k, top_p and min_p say.
        top_k: draw among the k most likely tokens only.
        top_p: draw among the most likely tokens whose probabilities sum to p.
        repetition_penalty: values above 1 make tokens less likely that occurred in the prompt or the reply.
        seed: draws depend on the seed, the logits and the number of tokens drawn before, and on nothing else. None: a
            new seed each time.
        min_p: draw only among tokens at least this share as likely as the most likely one.
        presence_penalty: is subtracted once from the logit of each token that was chosen before.
        frequency_penalty: is subtracted from that logit as often as the token was chosen.
        logit_bias: token id -> the number that is added to its logit. It is kept as pairs.
        min_tokens: no end token is chosen, and no stop string looked for, before this many tokens.
        length_decay: (start, factor): from the token `start` on, end tokens become more likely, as transformers'
            `exponential_decay_length_penalty` makes them.
    Raises:
        BatchError: a wrong value. The message names the option and the value.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = ()
    min_tokens: int = 0
    length_decay: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", _read_bias(self.logit_bias))
        if isinstance(self.length_decay, list):  # A file gives a list.
            object.__setattr__(self, "length_decay", tuple(self.length_decay))
        for option, is_fine, wanted in self._rules():
            if not is_fine:
                raise BatchError(f"{option}={getattr(self, option)!r}; give {wanted}")

    def _rules(self) -> Iterable[tuple[str, bool, str]]:
        """Yield each option, whether its value is possible, and which values are."""
        k, p, seed, decay = self.top_k, self.top_p, self.seed, self.length_decay
        yield "temperature", _is_number(self.temperature) and self.temperature >= 0, "0 for greedy, or more"
        yield "top_k", k is None or is_integer(k, 1), "an integer >= 1, or None for all"
        yield "top_p", p is None or (_is_number(p) and 0 < p <= 1), "0 < p <= 1, or None for all"
        penalty = self.repetition_penalty
        yield "repetition_penalty", _is_number(penalty) and penalty > 0, "a number above 0; 1 changes nothing"
        yield "seed", seed is None or is_integer(seed), "an integer, or None for a new one each time"
        yield "min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "0 <= p <= 1; 0 changes nothing"
        for name in ("presence_penalty", "frequency_penalty"):
            yield name, _is_number(getattr(self, name)), "a number; 0 changes nothing"
        yield "min_tokens", is_integer(self.min_tokens, 0), "an integer >= 0"
        is_decay = isinstance(decay, tuple) and len(decay) == 2 and is_integer(decay[0], 0) and _is_number(decay[1])
        yield "length_decay", decay is None or (is_decay and decay[1] >= 1), "(start, factor >= 1), or None"

    @property
    def is_greedy(self) -> bool:
        """Return whether nothing is drawn. Penalties and bias may still change which token is the most likely one."""
        return self.temperature == 0

    @property
    def is_plain(self) -> bool:
        """Return whether the choice is the argmax of the logits as they are."""
        return self.is_greedy and not (self.changes_logits or self.min_tokens or self.length_decay)

    def is_plain_at(self, n_chosen: int) -> bool:
        """Return whether the choice after `n_chosen` tokens is the argmax of the logits as they are."""
        has_begun = self.length_decay is not None and n_chosen > self.length_decay[0]
        return self.is_greedy and not (self.changes_logits or n_chosen < self.min_tokens or has_begun)

    @property
    def counts_tokens(self) -> bool:
        """Return whether the choice depends on which tokens were there before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """Return whether the logits are changed at every position of a reply."""
        return self.counts_tokens or bool(self.logit_bias)


def check_sampling(sampling: object) -> None:
    """Raise BatchError unless this is a `Sampling`."""
    if not isinstance(sampling, Sampling):
        meant = (
            f"**{sampling!r}"
            if isinstance(sampling, dict)
            else f"temperature={sampling if _is_number(sampling) else 0.7}"
        )
        raise BatchError(f"sampling={sampling!r}; give a chat.sampling.Sampling, such as Sampling({meant})")


def _read_bias(bias: object) -> tuple[tuple[int, float], ...]:
    """Return a bias as ascending pairs of token id and number. Raises BatchError."""
    try:
        pairs = tuple(sorted((i, x) for i, x in (bias.items() if isinstance(bias, Mapping) else bias)))  # type: ignore[attr-defined]
        if all(is_integer(i, 0) and _is_number(x) for i, x in pairs):
            return tuple((int(i), float(x)) for i, x in pairs)
    except (TypeError, ValueError):
        pass
    raise BatchError(f"logit_bias={bias!r}; give {{token id: number}}")


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float | np.integer | np.floating)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )
