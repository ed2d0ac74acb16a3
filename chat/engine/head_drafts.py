"""Drafts the next tokens of an engine's replies with a draft head, which reads the model's hidden states.

The head's memory has a sequence for each job that drafts. Its token i is the text's token i + 1, which was fed beside
the hidden state of position i (`models.draft_heads.interface`). So what the head remembers is a function of the text,
and what is wrong in it is found by comparing tokens, as for a draft model. Hidden states cannot be computed again
without the model: where those of a prefix are missing, the head's sequence begins after them. Its drafts may be worse
then, and replies stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from hybridmem.chat.engine.arguments import check_belonging
from hybridmem.chat.engine.draft_models import Drafts, Follower, Guess, ModelDrafter
from hybridmem.chat.engine.hidden_states import HeldRows, Watched
from hybridmem.chat.engine.remembered_texts import RememberedTexts
from hybridmem.chat.engine.requests import Job
from hybridmem.chat.prompts import Tokenizer
from hybridmem.defaults import STEP_TOKENS
from hybridmem.memory import CapacityError, HybridMemory, Sequence, SpecError, Step
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.sequences import uninterrupted
from hybridmem.models import LanguageModel
from hybridmem.models.draft_heads import DraftHead, HiddenRows, RecordedHead

_MOST_HELD, _KEPT = 64, 8
"""Hidden states of more than this many tokens of a sequence are fed to the head, whether or not it drafts, and only
the last few are held on. They are outside of the budget: at most so many rows of a reply, and those of the last step.
"""


class HeadDrafter(ModelDrafter):
    """Drafts with a head of the model itself. Its sequences follow the jobs' as those of a draft model do.

    Prompts are fed to the head while the model computes them, which costs about as much as one more layer. With
    `prefixes`, the head remembers texts wherever the model does: see `chat.engine.remembered_texts`.

    Args:
        model: the engine's model, whose hidden states the head reads.
        memory: a memory made from `head.memory_spec`, for this drafter alone. Its rollback window limits drafts.
        prefixes: a cache of prefixes in that memory, so that the head remembers prompts that begin alike.
        step_tokens: the most pairs that are fed before one draft.
    Raises:
        SpecError: parts that do not belong together, or a model without hidden states for draft heads.
    """

    _first_token = 1
    _keeps_guesses = False  # Guesses were fed beside rows of the head itself, and the text is fed beside the model's.

    def __init__(
        self, model: LanguageModel, head: DraftHead, memory: HybridMemory, *, prefixes: PrefixCache | None = None,
        step_tokens: int = STEP_TOKENS,
    ) -> None:  # fmt: skip
        super().__init__(cast(LanguageModel, head), memory, prefixes=prefixes, step_tokens=step_tokens)
        self._head, self._steps, self._hidden_rows = head, RecordedHead(head), HiddenRows(model, head.after)
        self._rows = WeakKeyDictionary[Sequence, HeldRows]()
        self._running: Callable[[], Iterable[Job]] = tuple
        self._is_paused, self._unseen = False, WeakSet[Job]()  # Jobs of `_unseen` began during a pause.
        self._target: HybridMemory | None = None  # This is the model's memory, once an engine uses this drafter.

    def check(self, memory: HybridMemory, tokenizer: Tokenizer | None) -> None:
        check_belonging(self._hidden_rows.model, memory, None)
        self._target = memory
        super().check(memory, tokenizer)

    def watch(self, model: LanguageModel, running: Callable[[], Iterable[Job]]) -> LanguageModel:
        if model is not self._hidden_rows.model:
            raise SpecError("this draft head reads the hidden states of another model; give it the engine's")
        self._running = running
        return Watched(self._hidden_rows, self._show, lambda: not self._is_paused)

    def pause(self) -> None:
        self._is_paused = True
        for job in [*self._followers]:
            self._close(job)
        self._rows.clear()

    def resume(self) -> None:
        self._is_paused = False
        self._unseen.update(self._running())

    def n_behind(self, job: Job) -> int | None:
        if job in self._unseen:
            return None
        n_behind, rows = super().n_behind(job), self._rows_of(job)
        if n_behind is None or rows is None:
            return None
        return min(n_behind, rows.end - rows.start)

    def draft(self, wanted: Mapping[Job, int]) -> Drafts:
        # Without the hidden state of the last position, there is no pair from which to draft.
        return super().draft({job: n for job, n in wanted.items() if self._rows_of(job) is not None})

    def resumes_at(self, sequence: Sequence, n_tokens: int, owner: Hashable) -> int:
        """Return one position less if the head remembers the text, and only its last hidden state is unknown.

        The state is paired with the token that comes next, so it belongs to no text that was remembered. The model
        computes it again with the last token.
        """
        rows = self._rows.get(sequence)
        is_known = rows is not None and rows.start < n_tokens <= rows.end
        if self._is_paused or is_known or self.texts is None or n_tokens < 2:
            return n_tokens
        if not self._target_can_return(sequence, n_tokens - 1):
            return n_tokens
        return n_tokens - 1 if self.texts.hold(sequence.tokens[:n_tokens], owner) else n_tokens

    def _target_can_return(self, sequence: Sequence, to: int) -> bool:
        return self._target is not None and self._target.can_rollback(sequence, to)

    def remember(self, job: Job) -> None:
        if self.texts is None or job.sequence not in self._rows:
            return
        with self._following():
            self._feed_ahead([job])
            follower = self._followers.get(job)
            if follower is not None and not follower.sequence.is_swapped:
                with uninterrupted():
                    self._remember(job, follower, self.texts)

    # The methods below hold hidden states.

    def _show(self, step: Step, rows_TR: Tensor) -> None:
        with self._following():
            self._hold(step, rows_TR)

    def _hold(self, step: Step, rows_TR: Tensor) -> None:
        """Hold the hidden states of an open step, in the caller's order, and feed the oldest if too many are held.

        If the step is aborted, they are replaced when their positions are fed again.
        """
        parts = torch.split(rows_TR, step.tokens.counts.tolist())
        many = set[Sequence]()
        for sequence, rows_NR in zip(step.sequences, parts, strict=True):
            held = self._rows.get(sequence)
            if held is None:
                held = self._rows[sequence] = self._inherited(sequence)
            # A view would keep the rows of the whole step.
            held.add(sequence.length, rows_NR.clone() if len(rows_TR) > _MOST_HELD > len(rows_NR) else rows_NR)
            if held.end - held.start > _MOST_HELD:
                many.add(sequence)
        if many:
            self._feed_ahead([job for job in self._running() if job.sequence in many])
            for sequence in many:
                self._rows[sequence].keep_from(sequence.length - _KEPT)  # Later rows may be of rejected drafts.

    def _inherited(self, sequence: Sequence) -> HeldRows:
        """Return the hidden states that a fork takes over from its source: those of the prompt's last tokens."""
        for job in self._running():
            if job.sequence is sequence and job.is_forked:
                for other in job.others:
                    source = None if other.sequence is None else self._rows.get(other.sequence)
                    if source is not None and source.start < sequence.length <= source.end:
                        return source.until(sequence.length)
        return HeldRows(sequence.length)

    def _rows_of(self, job: Job) -> HeldRows | None:
        """Return the hidden states of a job, if that of its last position is among them."""
        sequence, n_pairs = job.live_sequence, job.n_base + len(job.tokens) - 1
        rows = self._rows.get(sequence)
        if rows is None and job.is_forked:
            rows = self._rows[sequence] = self._inherited(sequence)
        return None if rows is None or not rows.start < n_pairs <= rows.end else rows

    def _feed_ahead(self, jobs: list[Job]) -> None:
        """Feed pairs whose second token is known already, so that their hidden states need not be held."""
        guesses = dict[Job, Guess]()
        for job in jobs:
            rows = self._rows[job.live_sequence]
            n_pairs = min(rows.end, job.n_base + len(job.tokens) - 1)
            if job in self._left_out or n_pairs <= rows.start:
                continue
            try:
                follower = self._follow(job, {})
                assert follower is not None, "no other job is wanted"
                tokens = self._pairs(job, follower, rows, n_pairs)
            except CapacityError:
                continue  # These pairs are lost. The head's sequence begins after them.
            if tokens and max(tokens) < self._vocab_size:
                guesses[job] = Guess(0, None, next_ids=tokens)
        if not guesses:
            return
        try:
            self._advance(guesses)
        except CapacityError:
            return
        for job, guess in guesses.items():
            self._followers[job].n_settled += len(guess.next_ids)

    # The methods below open and advance the sequences of the head.

    def _open(self, job: Job, base: list[int]) -> Follower:
        """Open a sequence that begins where hidden states are held, or after a cached prefix of the text."""
        first = self._rows[job.live_sequence].start
        if self.texts is not None:
            sequence = self.texts.open([*base, *job.tokens], job.request.owner)
            if sequence.length >= first:
                return Follower(sequence, base, sequence.length, 1)
            self.memory.close(sequence)
        return Follower(self.memory.open(), base, 0, first + 1)

    def _remember(self, job: Job, follower: Follower, texts: RememberedTexts) -> None:
        if follower.shift == 1 and job.n_base + len(job.tokens) > 1:
            super()._remember(job, follower, texts)

    def _feeds(self, job: Job, follower: Follower) -> list[int]:
        rows = self._rows_of(job)
        return [] if rows is None else self._pairs(job, follower, rows, job.n_base + len(job.tokens) - 1)

    def _pairs(self, job: Job, follower: Follower, rows: HeldRows, n_pairs: int) -> list[int]:
        """Return the second tokens of pairs to be fed, up to position `n_pairs` of the text."""
        if follower.shift <= n_pairs:
            tokens = self._roll_back(job, follower)
            if self._next_pair(follower) >= rows.start:
                return tokens[: max(0, n_pairs - self._next_pair(follower))]
        with uninterrupted():  # The held rows begin after the pairs that the head has, so the head starts anew.
            self.memory.close(follower.sequence)
            follower.sequence, follower.n_settled, follower.shift = self.memory.open(), 0, rows.start + 1
        return self._roll_back(job, follower)[: n_pairs - rows.start]

    @staticmethod
    def _next_pair(follower: Follower) -> int:
        """Return the position of the next pair that the job's sequence is fed from the text."""
        return follower.n_settled + follower.shift - 1

    def _model_of(self, guesses: dict[Job, Guess]) -> Callable[[Step], Tensor]:
        rows_TM = torch.cat([self._rows_beside(job, guess) for job, guess in guesses.items()])

        def run(step: Step) -> Tensor:
            logits_SV, rows_SM = self._steps(step, rows_TM)
            for guess, row_1M in zip(guesses.values(), torch.split(rows_SM, 1), strict=True):
                guess.rows = row_1M
            return logits_SV

        return run

    def _rows_beside(self, job: Job, guess: Guess) -> Tensor:
        """Return the rows of the pairs of a draft's next tokens, (n, M)."""
        if guess.rows is not None:
            return guess.rows
        first = self._next_pair(self._followers[job])
        return self._head.read(self._rows[job.live_sequence].between(first, first + len(guess.next_ids)))
