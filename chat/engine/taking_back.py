"""Takes back calls of tools that break their schemas, and lets them be drawn again, before a client sees any of them.

Most calls keep to their grammar from their first token on. The others are read as text: those of formats without a
mark, those within thoughts, and those after a mark that is written in an unusual way. The text of such a call is held
back. If the call keeps to its schema, the text is passed on. Otherwise the reply returns to before the call, and the
call is drawn by its grammar.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Protocol

from hybridmem.chat.engine.output import CallReader
from hybridmem.chat.engine.streaming import TextStream
from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.chat.sampling.sampler import Sampler

_MOST_TAKEN_BACK = 8
"""At most this many calls of a reply are drawn again. Further calls stay as they are, so that every reply ends."""


class Reply(Protocol):
    """Declares the attributes of a generation that are read and changed here."""

    token_ids: list[int]
    logprobs: list[Chosen]
    text: str
    stopped_by: str | None
    n_taken_back: int
    n_discarded: int


class FollowedCalls:
    """Follows the calls of one reply.

    Args:
        follow: returns a reader for the calls of a new reply.
        sampler, stream: the reply's sampler and text stream, before its first token.
    Attributes:
        is_broken: whether the newest token has completed a call that breaks its schema.
        holds_back: whether the newest text waits until it is clear whether it belongs to such a call.
    """

    def __init__(self, follow: Callable[[], CallReader], sampler: Sampler, stream: TextStream) -> None:
        self._follow = follow
        self._first = copy(sampler), stream.ahead()
        self._reader: CallReader | None = follow()
        # These count the tokens, characters and log probabilities before the text that may be taken back.
        self._n_kept = self._n_text = self._n_logprobs = 0
        self._forced = set[int]()  # These are the numbers of tokens after which a call was drawn again.
        self._held, self._logprobs = "", list[Chosen]()
        self.is_broken = self.holds_back = False

    def pass_on(
        self, piece: str, reply: Reply, sampler: Sampler, stream: TextStream, ending: str | None, *, is_free: bool
    ) -> str:
        """Read the text of a new token. Return the text that clients may see now.

        Args:
            sampler, stream: the reply's sampler and text stream, which have taken the token.
            ending: why the reply ends with this token. None: it goes on.
            is_free: whether no grammar has chosen the token.
        """
        self._held += piece
        if self._reader is None:
            return self.release(reply)
        is_broken = self._reader.feed(piece, is_constrained=not is_free)
        if ending is not None:
            is_broken = self._reader.close(is_cut=ending != "stop") or is_broken
        if is_broken or sampler.has_missed:
            self.is_broken = True
            return ""
        is_kept = not is_free or (self._reader.is_quiet and not stream.holds_text)
        if is_kept:
            self._n_kept, self._n_text = len(reply.token_ids), len(stream.text)
        self.holds_back = not is_kept and ending is None
        if not self.holds_back:
            return self.release(reply)
        self._logprobs += reply.logprobs[self._n_logprobs :]
        del reply.logprobs[self._n_logprobs :]
        return ""

    def release(self, reply: Reply) -> str:
        """Return the text that was held back. The log probabilities of its tokens are added to the reply."""
        reply.logprobs[self._n_logprobs : self._n_logprobs] = self._logprobs
        self._n_logprobs = len(reply.logprobs)
        piece, self._held, self._logprobs = self._held, "", []
        return piece

    def take_back(self, reply: Reply, tokenize: Callable[[bytes], list[int]]) -> tuple[int, Sampler, TextStream]:
        """Shorten the reply to the text before the call.

        If the call begins inside of a token, the part of that token before the call is tokenized again.

        Returns:
            How many tokens are as they were, and a sampler and a stream that have taken the tokens of the reply. The
            sampler draws a call next.
        """
        assert self._reader is not None, "it has found the call"
        n_before, n_same, has_logprobs = len(reply.token_ids), self._n_kept, bool(reply.logprobs or self._logprobs)
        between = tokenize(reply.text[self._n_text : max(self._reader.begun_at, self._n_text)].encode())
        if n_same + len(between) >= n_before:  # There must be room for the call.
            between = []
        reply.token_ids[n_same:] = between
        reply.logprobs[self._n_logprobs :] = [Chosen(token_id) for token_id in between if has_logprobs]
        reply.n_taken_back += 1
        reply.n_discarded += n_before - n_same
        self._forced = {n for n in self._forced if n <= n_same} | {len(reply.token_ids)}
        sampler, stream = self._repeat(reply.token_ids)
        reply.text, reply.stopped_by = stream.text, None
        self._held, self._logprobs, self.is_broken = reply.text[self._n_text :], [], False
        self._reader = self._follow() if reply.n_taken_back < _MOST_TAKEN_BACK else None
        if self._reader is not None:
            self._reader.feed(reply.text, is_constrained=True)
        return n_same, sampler, stream

    def _repeat(self, token_ids: list[int]) -> tuple[Sampler, TextStream]:
        """Return a sampler and a stream that have taken the tokens of a reply."""
        sampler, stream = copy(self._first[0]), self._first[1].ahead()
        for n, token_id in enumerate(token_ids):
            if n in self._forced:
                sampler.begin_call()
            sampler.add(token_id)
            stream.add(token_id, may_stop=False)
        sampler.begin_call()
        return sampler, stream
