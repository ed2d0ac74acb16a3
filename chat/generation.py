"""Greedy decoding of many sequences at once, over `memory.step`.

Every step is one batch: a prompt of any length for those that start, one token for those that are decoding. Who finishes
drops out, who starts joins; nobody waits for anybody.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from memory import HybridMemory, Sequence
from models import LanguageModel


@dataclass
class Speed:
    """What a batch has done so far. `n_fed` counts every token the model computed: prompts and generated ones."""

    n_fed: int = 0
    n_generated: int = 0
    n_steps: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.n_fed / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.n_fed:,} tokens ({self.n_generated:,} of them generated) in {self.n_steps:,} steps and {self.seconds:.2f} s: "
            f"{self.tokens_per_second:,.0f} tokens/s"
        )


@dataclass(frozen=True)
class NewToken:
    """One token that the model chose for a sequence; `is_last` if it ends the reply."""

    sequence: Sequence
    token_id: int
    is_last: bool


class Batch:
    """Decodes any number of sequences together; new ones may join before any step.

    Args:
        stop_ids: tokens that end a reply; the first is the one written where a reply is cut short.
        remembers_end: also feed the token that ends a reply, so that the memory holds the whole turn and a next one can follow.
        step_tokens: a step with more tokens than these is run in chunks.
    """

    def __init__(
        self,
        model: LanguageModel,
        memory: HybridMemory,
        stop_ids: tuple[int, ...],
        *,
        remembers_end: bool = False,
        step_tokens: int = 512,
    ) -> None:
        self.model = model
        self.memory = memory
        self.speed = Speed()
        self._stop_ids = stop_ids
        self._remembers_end = remembers_end
        self._step_tokens = step_tokens
        self._waiting: dict[Sequence, list[int]] = {}
        self._n_left: dict[Sequence, int] = {}

    @property
    def is_idle(self) -> bool:
        """Nothing waits to be fed."""
        return not self._waiting

    def add(self, sequence: Sequence, token_ids: list[int], max_tokens: int) -> None:
        """Feed these tokens in the next step, behind what still waits, and then decode up to `max_tokens` more."""
        self._waiting[sequence] = [*self._waiting.get(sequence, ()), *token_ids]
        self._n_left[sequence] = max_tokens

    def discard(self, sequence: Sequence) -> None:
        """Stop decoding a sequence; the memory keeps what it has seen."""
        self._waiting.pop(sequence, None)
        self._n_left.pop(sequence, None)

    def step(self) -> list[NewToken]:
        """Feed everything that waits, and choose the next token of each sequence that is not done.

        Returns:
            The new tokens, in the order in which the sequences were added.
        Raises:
            As `HybridMemory.run`; nothing has changed then, and the same step can be tried again.
        """
        if self.is_idle:
            return []
        best = self._feed(self._waiting).argmax(-1).tolist()
        fed, self._waiting = list(self._waiting), {}
        chosen = [(s, t) for s, t in zip(fed, best, strict=True) if self._n_left[s] > 0]
        self.speed.n_generated += len(chosen)
        return [self._take(sequence, token_id) for sequence, token_id in chosen]

    def _feed(self, requests: dict[Sequence, list[int]]) -> Tensor:
        """(n_requests, vocab) logits of the last tokens."""
        n_tokens, started = sum(map(len, requests.values())), time.perf_counter()
        if n_tokens <= self._step_tokens:
            with self.memory.step(requests) as step:
                logits = self.model(step)
        else:  # run() marks every sequence first, which a step of single tokens should not pay for
            whole = self.memory.run(self.model, requests, max_tokens=self._step_tokens)
            assert whole is not None  # only a dry run has no logits
            logits = whole
        if logits.device.type == "cuda":
            torch.cuda.synchronize(logits.device)  # or the clock would stop before the work does
        self.speed.seconds += time.perf_counter() - started
        self.speed.n_fed += n_tokens
        self.speed.n_steps += 1
        return logits

    def _take(self, sequence: Sequence, token_id: int) -> NewToken:
        self._n_left[sequence] -= 1
        is_stop = token_id in self._stop_ids
        is_last = is_stop or self._n_left[sequence] == 0
        if not is_last:
            self._waiting[sequence] = [token_id]
            return NewToken(sequence, token_id, is_last)
        self._n_left[sequence] = 0
        if self._remembers_end:
            self._waiting[sequence] = [token_id] if is_stop else [token_id, *self._stop_ids[:1]]
        return NewToken(sequence, token_id, is_last)


def generate(batch: Batch, prompts: list[list[int]], max_tokens: int) -> Iterator[list[tuple[int, NewToken]]]:
    """Continue several prompts at once, step by step.

    Args:
        prompts: token ids, at least one each.
        max_tokens: to generate for each.
    Yields:
        After each step, (index of the prompt, its new token) in the order of `prompts`; the ending token is among them.
    Raises:
        As `HybridMemory.run`. The sequences are closed however it ends.
    """
    memory = batch.memory
    places = {memory.open(): i for i in range(len(prompts))}
    try:
        for sequence, i in places.items():
            batch.add(sequence, prompts[i], max_tokens)
        while not batch.is_idle:
            yield [(places[new.sequence], new) for new in batch.step()]
    finally:
        for sequence in places:
            batch.discard(sequence)
            memory.close(sequence)
