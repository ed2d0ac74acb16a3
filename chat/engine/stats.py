"""Counts what an engine does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hybridmem.memory.prefix import Lookup


@dataclass
class EngineStats:
    """Counts what an engine has done so far, in tokens unless the name says otherwise.

    Attributes:
        n_fed: tokens that the model computed, of prompts and replies.
        n_reused: tokens of prompts that came from the prefix cache instead.
        n_forked: tokens of prompts that came by a fork from another choice of the same request.
        recomputed: reason -> tokens of prompts that the model computed although the cache had seen them. The reason "no
            state": attention could have continued there, but no recurrent state was kept. The reason "last token": the
            last token is fed again for its output.
        n_steps: steps of the model.
        n_drafts: drafts that were verified. n_drafted, n_accepted: their tokens, and those of them that were right.
        drafted_at, accepted_at: place in a draft, from 0 -> drafts that had a token at that place, and those of them
            whose token was right. Tokens of a tree that exclude each other have the same place.
        saved_seconds: the time that drafts have saved, by what plain steps take. It is negative if they lost time.
        n_preempted, n_swapped_in: how often a request was preempted, and how often a preempted request was swapped in
            again.
        n_taken_back: calls of tools that broke their schemas and were drawn again. n_discarded: the number of tokens in
            these calls.
        finished: reason -> number of generations that ended with it.
        seconds: time in steps of the model, including the choice of tokens.
        mask_seconds: the part of `seconds` in which a step waited for masks of grammars after the model was done.
    """

    n_fed: int = 0
    n_reused: int = 0
    n_forked: int = 0
    recomputed: Counter[str] = field(default_factory=Counter)
    n_generated: int = 0
    n_steps: int = 0
    n_drafts: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    saved_seconds: float = 0.0
    n_preempted: int = 0
    n_swapped_in: int = 0
    n_taken_back: int = 0
    n_discarded: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    mask_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.n_fed / self.seconds if self.seconds else 0.0

    def count_draft(self, n_drafted: int, n_right: int, n_levels: int) -> None:
        """Count the tokens of a draft that was verified. Its longest path has `n_levels` tokens."""
        self.n_drafts += 1
        self.n_drafted += n_drafted
        self.n_accepted += n_right
        self.drafted_at.update(range(n_levels))
        self.accepted_at.update(range(n_right))

    def __str__(self) -> str:
        return (
            f"{self.n_fed:,} tokens ({self.n_generated:,} of them generated) in {self.n_steps:,} steps and "
            f"{self.seconds:.2f} s: {self.tokens_per_second:,.0f} tokens/s"
        )

    def count_lookup(self, lookup: Lookup) -> None:
        """Count the tokens of a prompt that came from the prefix cache, and those that were computed again."""
        could_reuse = min(lookup.by_attention, lookup.n_tokens - 1)
        self.n_reused += lookup.reused
        self.recomputed += Counter(
            {"no state": could_reuse - lookup.reused, "last token": lookup.by_attention - could_reuse}
        )
