"""Speculative decoding: drafts are fed with the last token in one step, and `step.accept` keeps those that the model agrees with.

A step of a few tokens takes little longer than a step of one, because it reads the weights once. A hybrid model usually pays for the
rest with a copy of its recurrent states for each token of a draft. Here rejected tokens only shorten the tail, so a draft of any length
that fits the rollback window needs no state but those that plain decoding has.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from chat.drafts import Draft, Drafter, DraftRequest, Draws, check_window
from chat.generation import Batch, NewToken
from chat.sampling import Sampling
from memory import CapacityError, HybridMemory, Sequence, SpecError
from models import LanguageModel

_NO_DRAFT = Draft([])


@dataclass
class Acceptance:
    """What drafts have been worth so far.

    Attributes:
        n_drafted: tokens of drafts that the model was fed.
        n_accepted: those of them that it agreed with.
        n_turns: times that a sequence got new tokens; n_generated: how many in all.
    """

    n_drafted: int = 0
    n_accepted: int = 0
    n_turns: int = 0
    n_generated: int = 0

    @property
    def rate(self) -> float:
        """Share of drafted tokens that were accepted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gets from a step; 1 without drafts."""
        return self.n_generated / self.n_turns if self.n_turns else 0.0

    def __str__(self) -> str:
        accepted = f"{self.n_accepted:,} of {self.n_drafted:,} drafted tokens accepted"
        return f"{accepted} ({self.rate:.0%}), {self.tokens_per_step:.2f} tokens a step"


class SpeculativeBatch(Batch):
    """A `Batch` whose steps may bring several tokens a sequence. Sequences have drafts of their own lengths, or none, in the same step.

    What it generates: unless sampled, each token is the likeliest after those before it, as in a `Batch`. The texts are equal unless
    - two logits are closer than a step of several tokens and steps of one round apart: in float32 up to 1e-4 of the logits' spread;
    - the memory is lossy (sparse or quantised attention): rows leave the exact tail by the furthest position fed, and drafts feed further.
    Sampled, every token has the distribution that it has without drafts (Leviathan et al. 2023), but not the same random numbers.

    A step with a prompt in it has no drafts: it wants the logits of last tokens only.

    Args:
        drafter: who guesses; see `chat.drafts`. It must not be shared with another batch.
        adapts: shorten drafts where they fail: to twice what was accepted of the sequence's last one, plus one.
        others: as `Batch`.
    Raises:
        SpecError: drafts longer than the memory's rollback window; a drafter of another vocabulary.
    """

    def __init__(
        self, model: LanguageModel, memory: HybridMemory, stop_ids: tuple[int, ...], drafter: Drafter, *,
        adapts: bool = True, remembers_end: bool = False, step_tokens: int = 512,
    ) -> None:  # fmt: skip
        super().__init__(model, memory, stop_ids, remembers_end=remembers_end, step_tokens=step_tokens)
        check_window(drafter.n_draft, memory)
        if drafter.vocab_size not in (None, memory.spec.vocab_size):
            raise SpecError(f"the drafter has a vocabulary of {drafter.vocab_size} tokens, the model one of {memory.spec.vocab_size}")
        self.acceptance = Acceptance()
        self._drafter = drafter
        self._adapts = adapts
        self._texts: dict[Sequence, list[int]] = {}
        self._draws: dict[Sequence, Draws] = {}
        self._n_draft: dict[Sequence, int] = {}

    def add(self, sequence: Sequence, token_ids: list[int], max_tokens: int, *, sampling: Sampling | None = None) -> None:
        """As `Batch.add`.

        Args:
            sampling: how this sequence's tokens are chosen; None: each is the likeliest.
        """
        super().add(sequence, token_ids, max_tokens)
        # A new list: whatever a drafter knows of this sequence may have been edited since.
        self._texts[sequence] = [*sequence.tokens.tolist(), *self._waiting[sequence]]
        self._n_draft[sequence] = self._drafter.n_draft
        self._draws.pop(sequence, None)
        if sampling is not None and not sampling.is_plain:
            self._draws[sequence] = Draws.of(sampling, self._texts[sequence])

    def discard(self, sequence: Sequence) -> None:
        super().discard(sequence)
        self._settle(sequence)
        self._drafter.forget(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Its reply is complete; the drafter may go on from what it knows if another one follows."""
        for known in (self._texts, self._draws, self._n_draft):
            known.pop(sequence, None)

    def step(self) -> list[NewToken]:
        """As `Batch.step`, with one or more new tokens of each sequence, in the order of its text.

        A step whose drafts the memory has no room for is taken without them.
        """
        if self.is_idle:
            return []
        drafts = self._draft()
        try:
            chosen = self._feed_drafts(drafts) if drafts else self._feed_plain()
        except CapacityError:
            if not drafts:
                raise
            chosen = self._feed_plain()
        self._waiting = {}
        return [self._keep(sequence, token_id) for sequence, token_ids in chosen.items() for token_id in token_ids]

    def _keep(self, sequence: Sequence, token_id: int) -> NewToken:
        self._waiting.pop(sequence, None)  # the token before this one is fed already
        new = self._take(sequence, token_id)
        self._texts[sequence].append(token_id)
        if sequence in self._draws:
            self._draws[sequence].sampler.add(token_id)
        self.speed.n_generated += 1
        if new.is_last:
            self._settle(sequence)
        return new

    def _draft(self) -> dict[Sequence, Draft]:
        """Drafts for those that are decoding, no longer than what they may still generate and a step may hold."""
        if any(len(tokens) > 1 for tokens in self._waiting.values()):
            return {}
        most = self._step_tokens // len(self._waiting) - 1
        requests = {
            s: DraftRequest(self._texts[s], n, self._draws.get(s))
            for s in self._waiting
            if (n := min(most, self._n_left[s] - 1, self._n_draft.get(s, 0))) > 0
        }
        return self._drafter.draft(requests) if requests else {}

    def _feed_plain(self) -> dict[Sequence, list[int]]:
        """Feed what waits; the next token of each sequence that is not done."""
        rows = self._feed(self._waiting)
        chosen = {s: self._verify(s, _NO_DRAFT, row[None]) for s, row in zip(self._waiting, rows, strict=True) if self._n_left[s] > 0}
        self.acceptance.n_turns += len(chosen)
        self.acceptance.n_generated += len(chosen)
        return chosen

    def _feed_drafts(self, drafts: dict[Sequence, Draft]) -> dict[Sequence, list[int]]:
        """Feed what waits with drafts behind it, and keep what the model agrees with; the new tokens of each sequence that is not done."""
        requests = {s: [*tokens, *drafts.get(s, _NO_DRAFT).token_ids] for s, tokens in self._waiting.items()}
        started, chosen = time.perf_counter(), {}
        with self.memory.step(requests, outputs="all") as step:
            rows = step.split(self.model(step))
            for sequence, rows_KV in zip(requests, rows, strict=True):
                if self._n_left[sequence] > 0:
                    chosen[sequence] = self._verify(sequence, drafts.get(sequence, _NO_DRAFT), rows_KV)
            step.accept({s: len(chosen[s]) for s in drafts})
        self.speed.seconds += time.perf_counter() - started
        self.speed.n_fed += sum(map(len, requests.values()))
        self.speed.n_steps += 1
        for sequence, draft in drafts.items():
            self._count(sequence, draft, chosen[sequence])
        self.acceptance.n_turns += len(chosen)
        self.acceptance.n_generated += sum(map(len, chosen.values()))
        return chosen

    def _verify(self, sequence: Sequence, draft: Draft, rows_KV: Tensor) -> list[int]:
        """The tokens that follow: the accepted part of the draft and one of the model's own, cut behind one that ends the reply.

        rows_KV: (1 + tokens of the draft, vocab) logits after the last token and after each of the draft.
        """
        draws = self._draws.get(sequence)
        token_ids = accept_likeliest(draft, rows_KV) if draws is None else accept_drawn(draft, rows_KV, draws.ahead())
        end = next((i for i, token_id in enumerate(token_ids, 1) if token_id in self._stop_ids), len(token_ids))
        return token_ids[:end]

    def _count(self, sequence: Sequence, draft: Draft, chosen: list[int]) -> None:
        n_accepted = sum(a == b for a, b in zip(draft.token_ids, chosen, strict=False))  # the model's own token differs from the draft's
        self.acceptance.n_drafted += len(draft.token_ids)
        self.acceptance.n_accepted += n_accepted
        if self._adapts:
            self._n_draft[sequence] = min(self._drafter.n_draft, 2 * n_accepted + 1)


def accept_likeliest(draft: Draft, rows_KV: Tensor) -> list[int]:
    """The leading tokens of a draft that are the likeliest, and the likeliest behind them."""
    best: list[int] = rows_KV.argmax(-1).tolist()
    n_accepted = next((i for i, (a, b) in enumerate(zip(draft.token_ids, best, strict=False)) if a != b), len(draft.token_ids))
    return best[: n_accepted + 1]


def accept_drawn(draft: Draft, rows_KV: Tensor, draws: Draws) -> list[int]:
    """Leading tokens of a draft, and one more, distributed as if the sampler had chosen each of them (Leviathan et al. 2023).

    A drafted token x, drawn from q, is accepted with probability min(1, p(x) / q(x)); else a token is drawn from max(0, p - q), normed,
    and the rest of the draft is dropped. A drafter that had no other choice has q(x) = 1: x is accepted with p(x), or p without x remains.

    Args:
        draws: is told of the tokens, one after the other.
    """
    token_ids: list[int] = []
    certain: list[Tensor | None] = [None] * len(draft.token_ids)
    for row_V, token_id, chances_V in zip(rows_KV, draft.token_ids, draft.chances or certain, strict=False):
        p_V = draws.probabilities(row_V)
        q = 1.0 if chances_V is None else float(chances_V[token_id])
        if draws.random.random() * q >= float(p_V[token_id]):
            return [*token_ids, draws.draw(_remainder(p_V, token_id, chances_V))]
        token_ids.append(token_id)
        draws.sampler.add(token_id)
    return [*token_ids, draws.draw(draws.probabilities(rows_KV[-1]))]


def _remainder(p_V: Tensor, token_id: int, chances_V: Tensor | None) -> Tensor:
    """What a token is drawn from where the drafted one was not accepted, not normed."""
    if chances_V is None:
        rest_V = p_V.clone()
        rest_V[token_id] = 0
    else:
        rest_V = (p_V - chances_V.to(p_V.device)).clamp(min=0)
    return rest_V if bool(rest_V.any()) else p_V  # p and q differ by rounding only: both are right
