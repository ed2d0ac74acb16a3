"""Counts what an engine does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hybridmem.memory.prefix import Lookup


@dataclass
class EngineStats:
    """Counts what an engine has done so far, in tokens unless the name says otherwise.

    Attributes:
        n_fed: computed by the model: prompts and generated tokens.
        n_reused: of prompts, taken from the prefix cache instead.
        n_forked: of prompts, taken by a fork from another choice of the same request instead.
        recomputed: reason -> tokens of prompts that the cache had seen before and the model computed all the same: "no
            state" of a recurrent layer was kept where attention could have gone on, or it was the "last token", which
            is fed for its output.
        n_steps: of the model.
        n_drafted, n_accepted: drafted and verified, and those of them that were right.
        n_preempted, n_swapped_in: times that a request was preempted, and that one was swapped in again.
        finished: reason -> generations.
        seconds: in steps of the model, choosing tokens included.
        mask_seconds: of these, waiting for masks of grammars when the model was done.
    """

    n_fed: int = 0
    n_reused: int = 0
    n_forked: int = 0
    recomputed: Counter[str] = field(default_factory=Counter)
    n_generated: int = 0
    n_steps: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_preempted: int = 0
    n_swapped_in: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    mask_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.n_fed / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.n_fed:,} tokens ({self.n_generated:,} of them generated) in {self.n_steps:,} steps and "
            f"{self.seconds:.2f} s: {self.tokens_per_second:,.0f} tokens/s"
        )

    def count_lookup(self, lookup: Lookup) -> None:
        """Count the tokens of a prompt that were reused from the prefix cache, and those that could not be."""
        could_reuse = min(lookup.by_attention, lookup.n_tokens - 1)
        self.n_reused += lookup.reused
        self.recomputed += Counter(
            {"no state": could_reuse - lookup.reused, "last token": lookup.by_attention - could_reuse}
        )
