"""Drafts the next tokens of an engine's replies with a head that drafts a block of tokens at once.

The head's sequences follow the text as those of other heads do (`chat.engine.head_drafts`). A block is fed after the
pairs of a sequence, in the same step, and is never kept.
"""

from __future__ import annotations

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
from hybridmem.models.draft_heads import BlockHead, DraftHead, RecordedBlockHead


class BlockDrafter(HeadDrafter):
    """Drafts with a head of the model that drafts a block of tokens at once. Arguments are those of `HeadDrafter`.

    Raises:
        SpecError: as `HeadDrafter`, or the head's memory cannot take back a block because of its layers with a window.
    """

    drafts_at_once = True

    def __init__(
        self, model: LanguageModel, head: BlockHead, memory: HybridMemory, *, prefixes: PrefixCache | None = None,
        step_tokens: int = STEP_TOKENS,
    ) -> None:  # fmt: skip
        super().__init__(model, cast(DraftHead, head), memory, prefixes=prefixes, step_tokens=step_tokens)
        has_window = any(
            isinstance(spec, AttentionSpec) and spec.window is not None for own in memory.spec.layers for spec in own
        )
        if has_window and memory.rollback_window < head.n_fed:
            raise SpecError(
                f"the draft head's memory has rollback_window={memory.rollback_window}, and {head.n_fed} tokens of a "
                f"block must be taken back; give it rollback_window={head.n_fed}"
            )
        self._block_head, self._blocks = head, RecordedBlockHead(head)
        self.most_drafted = min(self.most_drafted, head.n_drafted)

    def _advance(self, guesses: dict[Job, Guess]) -> None:
        """Feed the next tokens, and draft all tokens of the drafts that may grow."""
        started = time.perf_counter()
        requests, n_pairs = [], [len(guess.next_ids) for guess in guesses.values()]
        for job, guess in guesses.items():
            block = self._block_head.block_after(guess.next_ids[-1]) if guess.most_tokens else []
            requests.append((self._followers[job].sequence, [*guess.next_ids, *block]))
        rows_PM = cat([self._rows_beside(job, guess) for job, guess in guesses.items()])
        growing = [(job, guess) for job, guess in guesses.items() if guess.most_tokens]

        def run(step: Step) -> Tensor:
            return self._blocks(step, rows_PM, n_pairs)

        def take_blocks_back(logits_BNV: Tensor, step: Step) -> Tensor:
            step.accept({sequence: n for (sequence, _), n in zip(requests, n_pairs, strict=True)})
            return logits_BNV

        def keep(logits_BNV: Tensor) -> None:
            for (job, guess), rows_NV in zip(growing, logits_BNV, strict=True):
                self._fill(guess, rows_NV, job.request.output.end_ids)

        take_step(run, self.memory.step(requests), take_blocks_back, keep, uninterrupted())
        self.noted.append((max(1, len(growing)), time.perf_counter() - started))

    def _fill(self, guess: Guess, rows_NV: Tensor, end_ids: tuple[int, ...]) -> None:
        """Guess the tokens of a draft from the logits of its block. With a sampler, each depends on those before."""
        rows_NV = self._fit(rows_NV[: guess.most_tokens])
        likeliest = guess_tokens(rows_NV, [None] * len(rows_NV)) if guess.sampler is None else None
        for i in range(len(rows_NV)):
            if guess.is_ended:
                return
            guess.grow(likeliest[i] if likeliest else guess_tokens(rows_NV[i : i + 1], [guess.sampler])[0], end_ids)

    @staticmethod
    def _going(guesses: dict[Job, Guess]) -> dict[Job, Guess]:
        """Return nothing, because a block drafts all its tokens at once."""
        return {}
