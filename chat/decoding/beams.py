"""Generates several continuations of one prompt, by beam search or n-best sampling.

A beam is a fork: it shares all blocks with the others and copies what it writes, attention and recurrent states alike.
When other beams become the best, `memory.reorder` reassigns all sequences at once and copies no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hybridmem.chat.engine.arguments import check_parts, read_stop_ids
from hybridmem.chat.engine.loop import decode
from hybridmem.chat.engine.requests import read_token_ids
from hybridmem.chat.sampling.sampler import Sampler
from hybridmem.chat.sampling.sampling import Sampling, check_sampling
from hybridmem.memory import BatchError, HybridMemory, Sequence, Step
from hybridmem.memory.blocks import read_count
from hybridmem.memory.sequences import uninterrupted
from hybridmem.memory.step import Outputs
from hybridmem.models import LanguageModel


@dataclass(frozen=True)
class Beam:
    """Holds one continuation of a prompt.

    Attributes:
        token_ids: the generated tokens, with the stop token if one ended the beam.
        log_probability: the natural logarithm of the probability of all its tokens together.
        score: log_probability / n_tokens ** length_penalty. Beams are sorted by it.
    """

    token_ids: list[int]
    log_probability: float
    score: float


@dataclass(frozen=True)
class BeamOptions:
    """Holds the options of a beam search. Each means the same as in transformers' `generate`.

    Attributes:
        n_beams: how many beams are extended at once, and how many are returned.
        max_tokens: the most tokens of a beam. A beam of this length is complete.
        length_penalty: values above 0 favour long beams, values below 0 short ones. 0 compares plain log probabilities.
        early_stopping: True ends a search as soon as it has `n_beams` complete beams. False ends it when the best open
            beam, at its present length, scores no better than the worst complete one. A longer beam might still score
            better. "never" compares with the best score that the open beam could still reach. That is its score at full
            length if the penalty favours length.
        stop_ids: tokens that complete a beam.
    Raises:
        BatchError: a number that is not a positive integer.
    """

    n_beams: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_counts(n_beams=self.n_beams, max_tokens=self.max_tokens)
        if self.early_stopping not in (True, False, "never"):
            raise BatchError(f"early_stopping={self.early_stopping!r}; choose True, False or 'never'")
        if isinstance(self.length_penalty, bool) or not isinstance(self.length_penalty, int | float):
            raise BatchError(f"length_penalty={self.length_penalty!r}; give a number, 0 for plain log probabilities")
        object.__setattr__(self, "stop_ids", read_stop_ids(self.stop_ids))

    def score(self, log_probability: float, n_tokens: int) -> float:
        return float(log_probability / n_tokens**self.length_penalty)


def beam_search(
    model: LanguageModel, memory: HybridMemory, prompt_ids: list[int], n_beams: int, max_tokens: int, *,
    length_penalty: float = 1.0, early_stopping: bool | Literal["never"] = False, stop_ids: tuple[int, ...] = (),
) -> list[Beam]:  # fmt: skip
    """Return the continuations that beam search finds for a prompt, best first; see `BeamOptions`, `beam_searches`."""
    check_parts(model, memory, "beam_search(model, memory, prompt_ids, n_beams, max_tokens)")
    options = BeamOptions(n_beams, max_tokens, length_penalty, early_stopping, stop_ids)
    return beam_searches(model, memory, [prompt_ids], options)[0]


def beam_searches(
    model: LanguageModel, memory: HybridMemory, prompts: Seq[list[int]], options: BeamOptions
) -> list[list[Beam]]:
    """Search beams for several prompts of any lengths. All beams of all prompts run in one batch.

    Each step looks at the likeliest continuations of the open beams: (1 + stop ids) x n_beams of them, and at least 2 x
    n_beams. Complete ones count if they are among the first n_beams. The first n_beams of the others stay open.

    Returns:
        For each prompt, in order, up to `n_beams` complete beams, best first. Each search gives what it would give
        alone.
    Raises:
        As `HybridMemory.run`. All sequences are closed however it ends.
    """
    check_parts(model, memory, "beam_searches(model, memory, prompts, options)")
    if not isinstance(options, BeamOptions):
        raise BatchError(f"options={options!r}; give BeamOptions(n_beams, max_tokens)")
    if not isinstance(prompts, Iterable) or not (prompts := list(prompts)):
        raise BatchError(f"prompts={prompts!r}; give a list with the token ids of each prompt, at least one")
    searches: list[_Search] = []
    try:
        try:
            _search(model, memory, prompts, options, searches)
        finally:
            _close_all(memory, (beam for search in searches for beam in search.beams))
    finally:  # A Ctrl-C may have interrupted the first attempt to close them.
        _close_all(memory, (beam for search in searches for beam in search.beams))
    return [search.complete for search in searches]


def _search(
    model: LanguageModel, memory: HybridMemory, prompts: Seq[list[int]], options: BeamOptions, searches: list[_Search]
) -> None:  # fmt: skip
    with uninterrupted():
        for prompt in prompts:
            searches.append(_Search(memory, options, prompt))
    decode(model, memory, _Searching(searches))


def _close_all(memory: HybridMemory, sequences: Iterable[Sequence]) -> None:
    with uninterrupted():
        for sequence in sequences:
            if not sequence.closed:
                memory.close(sequence)


class _Searching:
    """Advances beam searches, as a mode of the generation loop.

    In each step, every beam gets one more token, and all are reordered.
    """

    outputs: Outputs = "last"

    def __init__(self, searches: list[_Search]) -> None:
        self._searches = searches

    def requests(self) -> dict[Sequence, list[int]]:
        self._searches = [search for search in self._searches if search.beams]
        return {beam: ids for search in self._searches for beam, ids in zip(search.beams, search.next_ids, strict=True)}

    def choose(self, logits: Tensor, step: Step | None) -> Tensor:
        return logits

    def keep(self, chosen: Tensor) -> None:
        rows = torch.split(chosen, [len(search.beams) for search in self._searches])
        for search, rows_BV in zip(self._searches, rows, strict=True):
            search.advance(rows_BV)


@dataclass(frozen=True)
class _Candidate:
    """Extends beam `parent` by one token. Its log probability is that of the beam and the token together."""

    parent: int
    token_id: int
    log_probability: float


class _Search:
    """Holds the beam search of one prompt.

    Attributes:
        beams: the sequences of the open beams. It is empty once the search is over.
        next_ids: the token that each of these sequences is fed next.
        complete: the best complete beams so far, best first.
    """

    def __init__(self, memory: HybridMemory, options: BeamOptions, prompt_ids: list[int]) -> None:
        self.beams = [memory.open()]
        self.next_ids = [prompt_ids]
        self.complete: list[Beam] = []
        self._memory = memory
        self._options = options
        self._texts: list[list[int]] = [[]]
        self._log_probabilities = torch.zeros(1)
        self._n_tokens = 0

    def advance(self, logits_BV: Tensor) -> None:
        """Choose the next beams. logits_BV: the logits after the last token of each open beam."""
        options = self._options
        self._n_tokens += 1
        candidates = self._candidates(logits_BV)
        is_full = len(self.complete) == options.n_beams
        if not (is_full and options.early_stopping is True):
            found = [self._completed(c) for c in candidates[: options.n_beams] if self._is_complete(c)]
            self.complete = sorted([*self.complete, *found], key=lambda beam: -beam.score)[: options.n_beams]
        going_on = [c for c in candidates if not self._is_complete(c)][: options.n_beams]
        with uninterrupted():
            self._go_on(going_on if going_on and self._may_improve(going_on[0].log_probability) else [])

    def _candidates(self, logits_BV: Tensor) -> list[_Candidate]:
        """Return the likeliest continuations of all open beams, the likeliest first."""
        log_BV = logits_BV.float().log_softmax(-1) + self._log_probabilities.to(logits_BV.device)[:, None]
        n_wanted = max(2, 1 + len(self._options.stop_ids)) * self._options.n_beams
        values, places = log_BV.flatten().topk(min(n_wanted, log_BV.numel()))
        vocab_size = log_BV.shape[1]
        return [
            _Candidate(i // vocab_size, i % vocab_size, value)
            for i, value in zip(places.tolist(), values.tolist(), strict=True)
        ]

    def _is_complete(self, candidate: _Candidate) -> bool:
        return candidate.token_id in self._options.stop_ids or self._n_tokens == self._options.max_tokens

    def _completed(self, c: _Candidate) -> Beam:
        return Beam(
            [*self._texts[c.parent], c.token_id],
            c.log_probability,
            self._options.score(c.log_probability, self._n_tokens),
        )

    def _may_improve(self, best_log_probability: float) -> bool:
        """Return whether an open beam may still be among the best, as `BeamOptions.early_stopping` defines it."""
        options = self._options
        if len(self.complete) < options.n_beams:
            return True
        if options.early_stopping is True:
            return False
        reaches_end = options.early_stopping == "never" and options.length_penalty > 0
        return (
            options.score(best_log_probability, options.max_tokens if reaches_end else self._n_tokens)
            > self.complete[-1].score
        )

    def _go_on(self, chosen: list[_Candidate]) -> None:
        """Make the chosen candidates the open beams. There are none if nothing was chosen.

        The first child of each beam keeps the beam's sequence. The others get the sequence of a beam without a child,
        or a fork.
        """
        parents = {c.parent for c in chosen}
        spare = [beam for i, beam in enumerate(self.beams) if i not in parents]
        own = {parent: self.beams[parent] for parent in parents}
        moves: dict[Sequence, Sequence] = {}
        placed: list[Sequence] = []
        for c in chosen:
            source = self.beams[c.parent]
            if c.parent in own:
                placed.append(own.pop(c.parent))
            elif spare:
                placed.append(spare.pop())
                moves[placed[-1]] = source
            else:
                self.beams.append(self._memory.fork(source))
                placed.append(self.beams[-1])
        self._memory.reorder(moves)
        self._texts = [[*self._texts[c.parent], c.token_id] for c in chosen]
        self._log_probabilities = torch.tensor([c.log_probability for c in chosen])
        self.next_ids = [[c.token_id] for c in chosen]
        self.beams = [*placed, *spare]
        while len(self.beams) > len(placed):
            self._memory.close(self.beams.pop())


def n_best(
    model: LanguageModel, memory: HybridMemory, prompt_ids: list[int], n: int, max_tokens: int, *,
    sampling: Sampling, stop_ids: tuple[int, ...] = (),
) -> list[Beam]:  # fmt: skip
    """Sample n continuations of a prompt, and sort them by their mean log probability, best first.

    The prompt is computed once.

    Args:
        sampling: how tokens are drawn. If it has a seed, continuation i uses seed + i.
        stop_ids: tokens that complete a continuation.
    Returns:
        n beams. Log probabilities are the model's own, before the sampling changes them. `score` is the mean for each
        token.
    Raises:
        As `HybridMemory.run`. BatchError: numbers that are not positive. All sequences are closed however it ends.
    """
    check_parts(model, memory, "n_best(model, memory, prompt_ids, n, max_tokens)")
    _check_counts(n=n, max_tokens=max_tokens)
    check_sampling(sampling)
    stop_ids = read_stop_ids(stop_ids)
    prompt_ids = read_token_ids(prompt_ids, memory.spec.vocab_size)
    seeds = [None if sampling.seed is None else sampling.seed + i for i in range(n)]
    samplers = [Sampler(replace(sampling, seed=seed), prompt_ids, stop_ids=stop_ids) for seed in seeds]
    mode = _Drawing(memory, prompt_ids, samplers, max_tokens, stop_ids)
    try:
        try:
            with uninterrupted():
                mode.sequences.append(memory.open())
            decode(model, memory, mode)
        finally:
            _close_all(memory, mode.sequences)
    finally:
        _close_all(memory, mode.sequences)  # A Ctrl-C may have interrupted the first attempt to close them.
    beams = [Beam(text, total, total / len(text)) for text, total in zip(mode.texts, mode.totals, strict=True)]
    return sorted(beams, key=lambda beam: -beam.score)


class _Drawing:
    """Draws n continuations, as a mode of the generation loop.

    In each step, every fork of the prompt gets one drawn token.

    Attributes:
        sequences: the prompt's sequence, and its forks once the prompt has been computed.
        texts, totals: the tokens of each continuation, and the sum of their log probabilities.
    """

    outputs: Outputs = "last"

    def __init__(
        self, memory: HybridMemory, prompt_ids: list[int], samplers: list[Sampler], max_tokens: int,
        stop_ids: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.sequences: list[Sequence] = []
        self.texts: list[list[int]] = [[] for _ in samplers]
        self.totals = [0.0] * len(samplers)
        self._memory, self._prompt_ids, self._samplers = memory, prompt_ids, samplers
        self._max_tokens, self._stop_ids = max_tokens, stop_ids
        self._running = list(range(len(samplers)))

    def requests(self) -> dict[Sequence, list[int]]:
        if not self.texts[0]:
            return {self.sequences[0]: self._prompt_ids}
        self._running = [
            i
            for i in self._running
            if self.texts[i][-1] not in self._stop_ids and len(self.texts[i]) < self._max_tokens
        ]
        return {self.sequences[i]: self.texts[i][-1:] for i in self._running}

    def choose(self, logits: Tensor, step: Step | None) -> Tensor:
        return logits

    def keep(self, chosen: Tensor) -> None:
        while len(self.sequences) < len(self.texts):
            self.sequences.append(self._memory.fork(self.sequences[0]))
        rows = chosen.expand(len(self._running), -1)
        for i, row_V, log_V in zip(self._running, rows, rows.float().log_softmax(-1), strict=True):
            self.texts[i].append(self._samplers[i].choose(row_V))
            self.totals[i] += float(log_V[self.texts[i][-1]])


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        read_count(name, value, 1, error=BatchError)
