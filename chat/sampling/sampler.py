"""Chooses the next tokens of many sequences at once, each by its own `Sampling` and as if it were alone."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.chat.sampling.grammar import DeadEndError, Matcher
from hybridmem.chat.sampling.masks import mask_rows_
from hybridmem.chat.sampling.processors import (
    draw_rows,
    favour_ends_,
    keep_min_p_,
    keep_top_k_,
    keep_top_p_,
    penalise_repetition_,
)
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.sampling.token_counts import TokenCounts
from hybridmem.chat.sampling.triggers import Trigger
from hybridmem.memory import StepError

_DRAWN_AT_ONCE = 64
"""This many random numbers are computed together, because setting up a stream takes as long as hundreds of numbers."""
_NUMBERS_A_COUNT = 4
"""Philox makes this many numbers from each value of its counter."""
NOT_FINITE = "the model's logits are not finite; give it a wider dtype, such as float32 or bfloat16"


class Sampler:
    """Chooses the tokens of one sequence, one after the other.

    A draw depends only on the seed, the logits and the number of tokens so far. So choosing again after a failed step
    gives the same token, whatever the other sequences of the batch are.

    Args:
        prompt_ids: all tokens that the sequence holds. The repetition penalty needs them.
        stop_ids: tokens that end the reply. `min_tokens` and `length_decay` need them.
        matcher: follows the reply through its grammar. Tokens that the grammar does not allow are never chosen.
        trigger: gives the sampler a matcher once the reply begins a call, for that call.
    Attributes:
        n_chosen: how many tokens were chosen so far.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: Iterable[int] = (),
        *,
        stop_ids: tuple[int, ...] = (),
        matcher: Matcher | None = None,
        trigger: Trigger | None = None,
    ) -> None:
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.matcher = matcher
        self._trigger = trigger
        self.n_chosen = 0
        self.counts: TokenCounts | None = None
        if sampling.counts_tokens:
            self.counts = TokenCounts(prompt_ids if sampling.repetition_penalty != 1 else ())
        self._key = (secrets.randbits(64) if sampling.seed is None else sampling.seed) % 2**64
        self._uniforms: tuple[int, list[float]] = -1, []

    def __copy__(self) -> Sampler:
        """Return a sampler that draws as this one does, and counts its own tokens."""
        twin = object.__new__(Sampler)
        twin.__dict__.update(self.__dict__)
        twin.counts = self.counts and self.counts.copy()
        twin.matcher = self.matcher and self.matcher.copy()
        twin._trigger = self._trigger and self._trigger.copy()
        return twin

    @property
    def is_plain(self) -> bool:
        """Return whether the next choice is the argmax of the logits as they are."""
        return self.matcher is None and self.sampling.is_plain_at(self.n_chosen)

    def uniform(self) -> float:
        """Return the number in [0, 1) that decides the next draw.

        It has index `n_chosen` in the random numbers of the seed (Philox).
        """
        block, place = divmod(self.n_chosen, _DRAWN_AT_ONCE)
        if self._uniforms[0] != block:
            stream = np.random.Philox(key=self._key, counter=block * _DRAWN_AT_ONCE // _NUMBERS_A_COUNT)
            self._uniforms = block, np.random.Generator(stream).random(_DRAWN_AT_ONCE).tolist()
        return self._uniforms[1][place]

    def choose(self, logits_V: Tensor) -> int:
        """Choose the next token and count it.

        Raises StepError if no logit is finite or one is NaN. Nothing has changed then.
        """
        token_id = self.draw(logits_V)
        self.add(token_id)
        return token_id

    def draw(self, logits_V: Tensor) -> int:
        """Return what `choose` would return, and change nothing. Cost: O(V), and with top_p a sort of V numbers."""
        (chosen,) = choose_rows(logits_V[None], [self])
        if isinstance(chosen, StepError):
            raise chosen
        return chosen

    def possible(self, draft: Sequence[int]) -> int:
        """Return how many leading tokens of a draft the grammar allows. Later tokens of the draft need not be fed."""
        return len(draft) if self.matcher is None else self.matcher.count_allowed(draft)

    @property
    def is_stopped(self) -> bool:
        """Return whether the grammar allows no more tokens."""
        return self.matcher is not None and self.matcher.is_stopped

    @property
    def may_end(self) -> bool:
        """Return whether the grammar, if there is one, is satisfied by what was chosen."""
        return self.matcher is None or self.matcher.is_accepting

    @property
    def has_missed(self) -> bool:
        """Return whether a call has begun in another way than its grammar requires."""
        return self._trigger is not None and self._trigger.has_missed

    def begin_call(self) -> None:
        """Let the next token begin a call, which keeps to its grammar."""
        assert self._trigger is not None, "the reply has a grammar of calls"
        self.matcher = self._trigger.force()

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Return the probability of each token to be chosen next, (V,) float32.

        Greedy sampling gives 1 to one token.
        """
        scores_1V = score_rows(logits_V[None], [self])
        if self.sampling.is_greedy:
            return torch.nn.functional.one_hot(scores_1V[0].argmax(), scores_1V.shape[1]).float()
        return scores_1V[0].softmax(-1)

    def add(self, token_id: int) -> None:
        """Count a token that was chosen."""
        self.n_chosen += 1
        if self.counts is not None:
            self.counts.add(token_id)
        if self.matcher is not None:
            self.matcher.add(token_id)
            if self._trigger is not None and self.matcher.is_done and not self._trigger.is_single:
                self.matcher = None  # The call has ended, and the reply is free again.
        elif self._trigger is not None:
            self.matcher = self._trigger.add(token_id)


def choose_rows(logits_SV: Tensor, samplers: Sequence[Sampler]) -> list[int | StepError]:
    """Return the next token of each sampler, from its row of the logits. No sampler changes.

    A row without finite logits, or with NaN, gets an error. The other rows do not.
    """
    scores_SV = score_rows(logits_SV, samplers)
    highest_S, best_S = scores_SV.max(-1)
    finite = torch.isfinite(highest_S).tolist()
    chosen: list[int | StepError] = list(best_S.tolist())
    drawn = [i for i, sampler in enumerate(samplers) if finite[i] and not sampler.sampling.is_greedy]
    if drawn:
        rows_SV = scores_SV if len(drawn) == len(samplers) else scores_SV[drawn]
        for i, token_id in zip(drawn, draw_rows(rows_SV, [samplers[i].uniform() for i in drawn]), strict=True):
            chosen[i] = token_id
    for i, sampler in enumerate(samplers):
        if sampler.matcher is not None and (error := sampler.matcher.error):
            chosen[i] = DeadEndError(f"the reply cannot go on by its grammar: {error}")
        elif not finite[i]:
            chosen[i] = StepError(NOT_FINITE)
    return chosen


def score_rows(logits_SV: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Return the scores of the samplers after all processors, (S, V) float32. The logits stay as they are."""
    scores_SV = logits_SV.detach().to(torch.float32, copy=True)
    _penalise_(scores_SV, samplers)
    _bias_(scores_SV, samplers)
    _decay_(scores_SV, samplers)
    matchers = [(i, sampler.matcher) for i, sampler in enumerate(samplers) if sampler.matcher is not None]
    if matchers:
        mask_rows_(scores_SV, matchers)
    _warp_(scores_SV, samplers)
    return scores_SV


def _penalise_(scores_SV: Tensor, samplers: Sequence[Sampler]) -> None:
    rows, ids, penalties, losses = list[int](), [], list[float](), []
    for i, sampler in enumerate(samplers):
        if sampler.counts is None or not len(sampler.counts.ids):
            continue
        counts, sampling = sampler.counts.counts, sampler.sampling
        rows += [i] * len(counts)
        ids.append(sampler.counts.ids)
        penalties += [sampling.repetition_penalty] * len(counts)
        losses.append(sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0))
    if rows:
        at = torch.tensor(rows), torch.from_numpy(np.concatenate(ids))
        row, column = (index.to(scores_SV.device) for index in at)
        if any(penalty != 1 for penalty in penalties):
            penalise_repetition_(scores_SV, row, column, scores_SV.new_tensor(penalties))
        scores_SV[row, column] -= scores_SV.new_tensor(np.concatenate(losses))


def _bias_(scores_SV: Tensor, samplers: Sequence[Sampler]) -> None:
    """Add biases, and rule out end tokens that would come too early."""
    added = [(i, *pair) for i, sampler in enumerate(samplers) for pair in sampler.sampling.logit_bias]
    added += [
        (i, stop_id, -torch.inf)
        for i, sampler in enumerate(samplers)
        if sampler.n_chosen < sampler.sampling.min_tokens
        for stop_id in sampler.stop_ids
    ]
    if added:
        rows, ids, values = zip(*added, strict=True)
        scores_SV.index_put_(_at(scores_SV, rows, ids), scores_SV.new_tensor(values), accumulate=True)


def _decay_(scores_SV: Tensor, samplers: Sequence[Sampler]) -> None:
    """Raise the scores of tokens that end a reply, more and more as it grows.

    These are end tokens, and characters that close parts of a grammar.
    """
    raised = []
    for i, sampler in enumerate(samplers):
        decay = sampler.sampling.length_decay
        may_end = sampler.n_chosen >= sampler.sampling.min_tokens  # Before `min_tokens`, end tokens are ruled out.
        if decay is not None and may_end and sampler.n_chosen > decay[0]:
            power = decay[1] ** min(sampler.n_chosen - decay[0], 512)
            ends = sampler.stop_ids if sampler.matcher is None else sampler.matcher.closing_ids()
            raised += [(i, token_id, min(power, 1e6)) for token_id in ends]
    if raised:
        rows, ids, powers = zip(*raised, strict=True)
        favour_ends_(scores_SV, *_at(scores_SV, rows, ids), scores_SV.new_tensor(powers))


def _at(scores_SV: Tensor, rows: Sequence[int], ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(rows, device=scores_SV.device), torch.tensor(ids, device=scores_SV.device)


def _warp_(scores_SV: Tensor, samplers: Sequence[Sampler]) -> None:
    """Divide by temperatures and keep only the likeliest tokens, in rows that are drawn."""
    drawn = [i for i, sampler in enumerate(samplers) if not sampler.sampling.is_greedy]
    if not drawn:
        return
    # A shift does not change probabilities. Without it, a temperature close to 0 would make large logits infinite.
    shifts_S1 = scores_SV.amax(-1, keepdim=True)
    samplings = [sampler.sampling for sampler in samplers]
    if len(drawn) < len(samplers):
        shifts_S1[[i for i, sampling in enumerate(samplings) if sampling.is_greedy]] = 0
    temperatures = [1.0 if sampling.is_greedy else sampling.temperature for sampling in samplings]
    scores_SV.sub_(shifts_S1).div_(scores_SV.new_tensor(temperatures)[:, None])
    _keep_in_rows_(keep_top_k_, scores_SV, {i: k for i in drawn if (k := samplings[i].top_k) is not None})
    _keep_in_rows_(keep_top_p_, scores_SV, {i: p for i in drawn if (p := samplings[i].top_p or 1) < 1})
    _keep_in_rows_(keep_min_p_, scores_SV, {i: p for i in drawn if (p := samplings[i].min_p) > 0})


def _keep_in_rows_(keep: Callable[[Tensor, list[Any]], None], scores_SV: Tensor, options: dict[int, Any]) -> None:
    """Keep only the likeliest tokens in some rows, each by its own option."""
    if len(options) == len(scores_SV):
        keep(scores_SV, list(options.values()))
    elif options:
        rows = list(options)
        some_SV = scores_SV[rows]
        keep(some_SV, list(options.values()))
        scores_SV[rows] = some_SV
