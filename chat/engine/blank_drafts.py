"""Drafts the next tokens of an engine's replies with a head that drafts several tokens at once.

The head's sequences follow the text as those of other heads do (`chat.engine.head_drafts`). Blanks are fed after
the pairs of a sequence, in the same step, and are never kept.
"""

from __future__ import annotations

import math
import time
from typing import cast

from torch import Tensor, cat

from hybridmem.chat.engine.draft_models import Guess, guess_tokens
from hybridmem.chat.engine.head_drafts import HeadDrafter
from hybridmem.chat.engine.loop import take_step
from hybridmem.chat.engine.requests import Job
from hybridmem.defaults import STEP_TOKENS
from hybridmem.memory import AttentionSpec, HybridMemory, SpecError, Step
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.sequences import uninterrupted
from hybridmem.models import LanguageModel
from hybridmem.models.draft_heads import BlankHead, DraftHead, RecordedBlankHead


class BlankDrafter(HeadDrafter):
    """Drafts with a head of the model that fills blanks. Other arguments are those of `HeadDrafter`.

    Args:
        least_chance: a draft ends before the first token of which the head is less sure than this: where the likeliest
            token has a smaller probability.
    Raises:
        SpecError: as `HeadDrafter`, or the head's memory cannot take blanks back because of its layers with a window.
    """

    drafts_at_once = True

    def __init__(
        self, model: LanguageModel, head: BlankHead, memory: HybridMemory, *, prefixes: PrefixCache | None = None,
        step_tokens: int = STEP_TOKENS, least_chance: float = 0.3,
    ) -> None:  # fmt: skip
        super().__init__(model, cast(DraftHead, head), memory, prefixes=prefixes, step_tokens=step_tokens)
        has_window = any(
            isinstance(spec, AttentionSpec) and spec.window is not None for own in memory.spec.layers for spec in own
        )
        if has_window and memory.rollback_window < head.n_fed:
            raise SpecError(
                f"the draft head's memory has rollback_window={memory.rollback_window}, and {head.n_fed} tokens of "
                f"blanks must be taken back; give it rollback_window={head.n_fed}"
            )
        self._blank_head, self._blanks, self._least_chance = head, RecordedBlankHead(head), least_chance
        self.most_drafted = min(self.most_drafted, head.n_drafted)

    def _advance(self, guesses: dict[Job, Guess]) -> None:
        """Feed the next tokens, and draft all tokens of the drafts that may grow."""
        started = time.perf_counter()
        requests, n_pairs = [], [len(guess.next_ids) for guess in guesses.values()]
        for job, guess in guesses.items():
            blanks = self._blank_head.blanks_after(guess.next_ids[-1]) if guess.most_tokens else []
            requests.append((self._followers[job].sequence, [*guess.next_ids, *blanks]))
        rows_PM = cat([self._rows_beside(job, guess) for job, guess in guesses.items()])
        growing = [(job, guess) for job, guess in guesses.items() if guess.most_tokens]

        def run(step: Step) -> Tensor:
            return self._blanks(step, rows_PM, n_pairs)

        def take_blanks_back(logits_SNV: Tensor, step: Step) -> Tensor:
            step.accept({sequence: n for (sequence, _), n in zip(requests, n_pairs, strict=True)})
            return logits_SNV

        def keep(logits_SNV: Tensor) -> None:
            for (job, guess), rows_NV in zip(growing, logits_SNV, strict=True):
                self._fill(guess, rows_NV, job.request.output.end_ids)

        take_step(run, self.memory.step(requests), take_blanks_back, keep, uninterrupted())
        self.noted.append((max(1, len(growing)), time.perf_counter() - started))

    def _fill(self, guess: Guess, rows_NV: Tensor, end_ids: tuple[int, ...]) -> None:
        """Guess the tokens of a draft from the logits of its blanks. With a sampler, each depends on those before."""
        rows_NV = self._fit(rows_NV[: guess.most_tokens])
        is_sure_N = rows_NV.amax(-1) - rows_NV.logsumexp(-1) >= math.log(max(self._least_chance, 1e-9))
        rows_NV = rows_NV[: int(is_sure_N.long().cumprod(0).sum())]
        likeliest = guess_tokens(rows_NV, [None] * len(rows_NV)) if guess.sampler is None else None
        for i in range(len(rows_NV)):
            if guess.is_ended:
                return
            guess.grow(likeliest[i] if likeliest else guess_tokens(rows_NV[i : i + 1], [guess.sampler])[0], end_ids)

    @staticmethod
    def _going(guesses: dict[Job, Guess]) -> dict[Job, Guess]:
        """Return nothing, because all tokens of a draft are drafted at once."""
        return {}
