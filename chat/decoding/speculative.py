"""Decodes speculatively: one step feeds the last token and a draft, and `step.accept` keeps the accepted tokens.

A step of a few tokens takes little longer than a step of one, because it reads the weights once. To undo rejected
tokens, implementations for hybrid models usually copy the recurrent states for each token of a draft. Here rejected
tokens only shorten the tail, so a draft of any length that fits the rollback window needs no more states than plain
decoding.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridmem.chat.decoding.acceptance import Acceptance, accept_drawn, accept_likeliest
from hybridmem.chat.decoding.drafts import Draft, Drafter, DraftRequest, Draws, check_counts, check_window
from hybridmem.chat.engine.arguments import check_parts, read_stop_ids
from hybridmem.chat.engine.loop import feed
from hybridmem.chat.engine.requests import check_max_tokens, read_token_ids
from hybridmem.chat.engine.stats import EngineStats
from hybridmem.chat.sampling.sampling import Sampling, check_sampling
from hybridmem.memory import CapacityError, HybridMemory, Sequence, SpecError, Step
from hybridmem.memory.sequences import uninterrupted_call
from hybridmem.memory.step import Outputs
from hybridmem.models import LanguageModel

_NO_DRAFT = Draft([])


@dataclass(frozen=True)
class NewToken:
    """Holds one token that the model chose for a sequence. `is_last` says whether it ends the reply."""

    sequence: Sequence
    token_id: int
    is_last: bool


class SpeculativeBatch:
    """Decodes any number of sequences together, several tokens of each in a step. New ones may join before any step.

    In one step, each sequence may have a draft of any length, or none. The caller owns the sequences. The memory must
    have room for them: here, unlike in the engine, no sequence waits or is swapped out.

    Without sampling, each token is the likeliest after those before it, as without drafts. The texts are equal, except
    in two cases:

    - Two logits are so close that rounding decides. A step of several tokens rounds differently from steps of one: in
      float32, logits differ by up to 1e-4 of their spread.
    - Attention has a policy or a storage. All queries of a step see the old rows as they were before the step, so it
      matters how tokens are divided into steps. Rejected drafts do not matter: a rollback undoes what they folded.

    With sampling, every token has the distribution that it has without drafts (Leviathan et al. 2023), but is drawn
    with other random numbers.

    A step with a prompt in it has no drafts: it computes the logits of last tokens only.

    Args:
        stop_ids: tokens that end a reply. The first is written after a reply that is cut short.
        drafter: makes the drafts; see `chat.decoding.drafts`. No other batch may use it.
        adapts: shorten drafts where they fail. A draft has at most 2 n + 1 tokens if n tokens of the sequence's last
            draft were accepted.
        remembers_end: also feed the token that ends a reply. The memory then holds the whole turn, and a next one can
            follow.
        step_tokens: a step with more tokens than these is run in chunks.
    Raises:
        SpecError: drafts longer than the memory's rollback window, or a drafter with another vocabulary.
    """

    def __init__(
        self, model: LanguageModel, memory: HybridMemory, stop_ids: tuple[int, ...], drafter: Drafter, *,
        adapts: bool = True, remembers_end: bool = False, step_tokens: int = 512,
    ) -> None:  # fmt: skip
        check_parts(model, memory, "SpeculativeBatch(model, memory, stop_ids, drafter)")
        if isinstance(drafter, type) or not callable(getattr(drafter, "draft", None)):
            raise SpecError(
                f"drafter={drafter!r} drafts nothing; give PromptLookup() or DraftModel(small_model, its_memory) of "
                "chat.drafts"
            )
        check_counts(step_tokens=step_tokens)
        check_window(drafter.n_draft, memory)
        if drafter.vocab_size not in (None, memory.spec.vocab_size):
            raise SpecError(
                f"the drafter has a vocabulary of {drafter.vocab_size} tokens, the model one of "
                f"{memory.spec.vocab_size}"
            )
        self.model = model
        self.memory = memory
        self.stats = EngineStats()
        self.acceptance = Acceptance()
        self._stop_ids = read_stop_ids(stop_ids, memory.spec.vocab_size)
        self._drafter = drafter
        self._adapts = adapts
        self._remembers_end = remembers_end
        self._step_tokens = step_tokens
        self._waiting: dict[Sequence, list[int]] = {}
        self._n_left: dict[Sequence, int] = {}
        self._texts: dict[Sequence, list[int]] = {}
        self._draws: dict[Sequence, Draws] = {}
        self._n_draft: dict[Sequence, int] = {}
        self._untold: list[NewToken] = []  # These tokens were chosen, and `step` has not returned them yet.

    @property
    def is_idle(self) -> bool:
        """Return whether no tokens wait to be fed or returned."""
        return not self._waiting and not self._untold

    def add(
        self, sequence: Sequence, token_ids: list[int], max_tokens: int, *, sampling: Sampling | None = None
    ) -> None:
        """Feed these tokens in the next step, after those that already wait, and then decode up to `max_tokens` tokens.

        Args:
            sampling: how this sequence's tokens are chosen. None: each is the likeliest.
        Raises:
            SequenceError, BatchError: as `HybridMemory.step`, and for wrong arguments. Nothing has changed then.
        """
        check_max_tokens(max_tokens)
        if sampling is not None:
            check_sampling(sampling)
        waiting = self._waiting.get(sequence, []) if isinstance(sequence, Sequence) else []
        ids = [*waiting, *read_token_ids(token_ids, self.memory.spec.vocab_size)]
        self.memory.step({sequence: ids})  # This raises for a handle that cannot take part. The step is never entered.
        self._waiting[sequence] = ids
        self._n_left[sequence] = max_tokens
        # Make a new list, because the text may have been edited since the drafter last saw it.
        self._texts[sequence] = [*sequence.tokens.tolist(), *self._waiting[sequence]]
        self._n_draft[sequence] = self._drafter.n_draft
        self._draws.pop(sequence, None)
        if sampling is not None and not sampling.is_plain:
            self._draws[sequence] = Draws.of(sampling, self._texts[sequence], self._stop_ids)

    def discard(self, sequence: Sequence) -> None:
        """Stop decoding a sequence. The memory keeps the tokens that were fed."""
        self._waiting.pop(sequence, None)
        self._untold = [new for new in self._untold if new.sequence is not sequence]
        self._settle(sequence)
        self._drafter.forget(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Free what is kept for a complete reply. The drafter keeps its data for the sequence's next reply."""
        for known in (self._texts, self._draws, self._n_draft, self._n_left):
            known.pop(sequence, None)

    def step(self) -> list[NewToken]:
        """Feed all waiting tokens, and choose one or more next tokens of each sequence that is not done.

        If the memory has no room for the drafts, the step is taken without them.

        Returns:
            The new tokens. Sequences come in the order in which they were added, and tokens in the order of their text.
        Raises:
            As `HybridMemory.run`. Nothing has changed then, and the same step can be tried again. If a Ctrl-C comes
            while the step commits, the next call returns the step's tokens.
        """
        if self._waiting and not self._untold:
            self._advance()
        with uninterrupted_call(holds_all=True) as until_return:
            new, self._untold = self._untold, []
        del until_return
        return new

    def _advance(self) -> None:
        """Take a step and keep its tokens, or do neither."""
        drafts = self._draft()
        try:
            self._feed(drafts)
        except CapacityError:
            if not drafts:
                raise
            self._feed({})

    def _feed(self, drafts: dict[Sequence, Draft]) -> None:
        mode = _Verifying(self, drafts)
        feed(self.model, self.memory, mode, mode.requests(), step_tokens=self._step_tokens)

    def _note(self, chosen: dict[Sequence, list[int]]) -> None:
        """Keep the chosen tokens, and queue the tokens to feed next."""
        self.acceptance.n_turns += len(chosen)
        self.acceptance.n_generated += sum(map(len, chosen.values()))
        self._waiting = {}
        self._untold = [
            self._keep(sequence, token_id) for sequence, token_ids in chosen.items() for token_id in token_ids
        ]
        if not self._waiting:
            self._drafter.draft({})  # This tells the drafter that no reply is under way.

    def _keep(self, sequence: Sequence, token_id: int) -> NewToken:
        self._waiting.pop(sequence, None)  # The token before this one has already been fed.
        new = self._take(sequence, token_id)
        self._texts[sequence].append(token_id)
        if sequence in self._draws:
            self._draws[sequence].sampler.add(token_id)
        self.stats.n_generated += 1
        if new.is_last:
            self._settle(sequence)
        return new

    def _take(self, sequence: Sequence, token_id: int) -> NewToken:
        """Count a chosen token, and queue the token to feed next."""
        self._n_left[sequence] -= 1
        is_stop = token_id in self._stop_ids
        is_last = is_stop or self._n_left[sequence] == 0
        if not is_last:
            self._waiting[sequence] = [token_id]
        elif self._remembers_end:
            self._waiting[sequence] = [token_id] if is_stop else [token_id, *self._stop_ids[:1]]
        return NewToken(sequence, token_id, is_last)

    def _draft(self) -> dict[Sequence, Draft]:
        """Make drafts for sequences that decode.

        A draft is no longer than what the sequence may still generate and the step may hold.
        """
        if any(len(tokens) > 1 for tokens in self._waiting.values()):
            return {}
        most = self._step_tokens // len(self._waiting) - 1
        requests = {
            s: DraftRequest(self._texts[s], n, self._draws.get(s))
            for s in self._waiting
            if (n := min(most, self._n_left.get(s, 0) - 1, self._n_draft.get(s, 0))) > 0
        }
        return self._drafter.draft(requests) if requests else {}

    def _verify(self, sequence: Sequence, draft: Draft, rows_KV: Tensor) -> list[int]:
        """Return the accepted part of the draft and one token of the model's own.

        The list is cut after a token that ends the reply.

        rows_KV: the logits after the last token and after each token of the draft, (1 + tokens of the draft, vocab).
        """
        draws = self._draws.get(sequence)
        token_ids = accept_likeliest(draft, rows_KV) if draws is None else accept_drawn(draft, rows_KV, draws.ahead())
        end = next((i for i, token_id in enumerate(token_ids, 1) if token_id in self._stop_ids), len(token_ids))
        return token_ids[:end]

    def _count(self, sequence: Sequence, draft: Draft, chosen: list[int]) -> None:
        # The model's own token differs from the draft's.
        n_accepted = sum(a == b for a, b in zip(draft.token_ids, chosen, strict=False))
        self.acceptance.n_drafted += len(draft.token_ids)
        self.acceptance.n_accepted += n_accepted
        if self._adapts:
            self._n_draft[sequence] = min(self._drafter.n_draft, 2 * n_accepted + 1)


class _Verifying:
    """Verifies drafts, as a mode of the generation loop.

    A step keeps the accepted part of each draft, and one token of the model's own.
    """

    def __init__(self, batch: SpeculativeBatch, drafts: dict[Sequence, Draft]) -> None:
        self.outputs: Outputs = "all" if drafts else "last"
        self._batch, self._drafts = batch, drafts
        self._started, self._n_fed = time.perf_counter(), 0

    def requests(self) -> dict[Sequence, list[int]]:
        requests = {s: [*ids, *self._drafts.get(s, _NO_DRAFT).token_ids] for s, ids in self._batch._waiting.items()}
        self._n_fed = sum(map(len, requests.values()))
        return requests

    def choose(self, logits: Tensor, step: Step | None) -> dict[Sequence, list[int]]:
        """Verify the drafts. Return the next tokens of each sequence whose reply is not complete."""
        batch = self._batch
        rows: Iterable[Tensor] = logits[:, None]
        if self._drafts:
            assert step is not None, "drafts are not fed in chunks"
            rows = step.split(logits)
        chosen = {
            sequence: batch._verify(sequence, self._drafts.get(sequence, _NO_DRAFT), rows_KV)
            for sequence, rows_KV in zip(batch._waiting, rows, strict=True)
            if batch._n_left.get(sequence, 0) > 0
        }
        if step is not None and self._drafts:
            step.accept({sequence: len(chosen[sequence]) for sequence in self._drafts})
        return chosen

    def keep(self, chosen: dict[Sequence, list[int]]) -> None:
        batch, device = self._batch, self._batch.memory.spec.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # Without this, the clock would stop before the work is done.
        batch.stats.seconds += time.perf_counter() - self._started
        batch.stats.n_fed += self._n_fed
        batch.stats.n_steps += 1
        for sequence, draft in self._drafts.items():
            batch._count(sequence, draft, chosen[sequence])
        batch._note(chosen)
