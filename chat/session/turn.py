"""Describes a turn of a session: the reply, and the reason why each token of the prompt was computed."""

from __future__ import annotations

from dataclasses import dataclass

from hybridmem.chat.session.history import Rendering
from hybridmem.chat.session.reuse import Start

NEW = "new text"
EDITED = "edited text"
REWRITTEN = "history that the template renders otherwise now"
NO_CHECKPOINT = "no checkpoint near enough"
LAST = "last token, for its output"


@dataclass(frozen=True)
class Turn:
    """Holds a reply and its cost. All counts are tokens.

    Attributes:
        text: the reply.
        token_ids: the chosen tokens, including the one that ended the reply.
        finish_reason: "stop", "length", or "cancelled" if somebody else ended the reply.
        n_prompt: tokens of the whole history, with the opening of the reply.
        n_reused: how many leading tokens of the prompt the memory held already.
        computed: reason -> how many tokens of the prompt the model had to compute for that reason, `n_prompt -
            n_reused` in all.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    n_prompt: int
    n_reused: int
    computed: dict[str, int]

    @property
    def n_computed(self) -> int:
        return self.n_prompt - self.n_reused


def explain(why: str, prompt: Rendering, start: Start, n_old: int, *, was_held: bool) -> dict[str, int]:
    """Count the computed tokens by reason, in the order in which they stand in the prompt."""
    n = len(prompt.token_ids)
    n_known = min(start.n_known, n - 1)
    at, found = start.n_kept, dict[str, int]()
    for reason, end in ((NO_CHECKPOINT, n_known), (REWRITTEN if was_held else NO_CHECKPOINT, n_old), (why, n)):
        if reason == why and start.n_known >= n:
            reason = LAST
        if end > at:
            found[reason] = found.get(reason, 0) + end - at
            at = end
    return found
