"""Decides which tokens of a draft are accepted.

Replies are the same, or have the same distribution, as without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybridmem.chat.decoding.drafts import Draft, Draws


@dataclass
class Acceptance:
    """Counts drafted and accepted tokens.

    Attributes:
        n_drafted: how many tokens of drafts were fed to the model.
        n_accepted: how many of them were accepted.
        n_turns: how often a sequence got new tokens. n_generated: the number of these tokens in all.
    """

    n_drafted: int = 0
    n_accepted: int = 0
    n_turns: int = 0
    n_generated: int = 0

    @property
    def rate(self) -> float:
        """Return the share of drafted tokens that were accepted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Return the mean number of tokens that a sequence gets from a step. It is 1 without drafts."""
        return self.n_generated / self.n_turns if self.n_turns else 0.0

    def __str__(self) -> str:
        accepted = f"{self.n_accepted:,} of {self.n_drafted:,} drafted tokens accepted"
        return f"{accepted} ({self.rate:.0%}), {self.tokens_per_step:.2f} tokens a step"


def accept_likeliest(draft: Draft, rows_KV: Tensor) -> list[int]:
    """Return the leading tokens of a draft that the model finds likeliest, and its likeliest token after them."""
    best: list[int] = rows_KV.max(-1).indices.tolist()  # This is several times as fast as argmax on a CPU.
    n_accepted = next(
        (i for i, (a, b) in enumerate(zip(draft.token_ids, best, strict=False)) if a != b), len(draft.token_ids)
    )
    return best[: n_accepted + 1]


def accept_drawn(draft: Draft, rows_KV: Tensor, draws: Draws) -> list[int]:
    """Return the accepted tokens of a draft, and one token more.

    They have the distribution of the sampler's own tokens (Leviathan et al. 2023).

    Let q be the distribution from which the drafter drew a token x, and p the model's. The token is accepted with
    probability min(1, p(x) / q(x)). Otherwise a token is drawn from max(0, p - q), normed, and the draft's later tokens
    are dropped. If the drafter did not draw, q(x) = 1: x is accepted with probability p(x), and otherwise the token is
    drawn from p without x.

    Args:
        draws: draws the tokens. Its sampler counts them one after the other.
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
    """Return the weights (not normalized) from which the token that replaces a rejected one is drawn."""
    if chances_V is None:
        rest_V = p_V.clone()
        rest_V[token_id] = 0
    else:
        rest_V = (p_V - chances_V.to(p_V.device)).clamp(min=0)
    return rest_V if bool(rest_V.any()) else p_V  # Here p and q differ only by rounding, so either is right.
