"""Defines what form a reply may have, and what is reported with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from hybridmem.chat.engine.arguments import read_stop_ids
from hybridmem.chat.sampling.grammar import Grammar
from hybridmem.chat.sampling.logprobs import MOST_LOGPROBS
from hybridmem.chat.sampling.triggers import CallGrammar
from hybridmem.memory import BatchError
from hybridmem.memory.blocks import is_integer


class CallReader(Protocol):
    """Declares the interface of a reader of one reply's text, which finds calls that break their schemas."""

    @property
    def begun_at(self) -> int:
        """Return the number of characters before the newest call."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Return whether the text's end cannot belong to a call."""
        ...

    def feed(self, text: str, *, is_constrained: bool) -> bool:
        """Read more text. Return whether a call in it is complete and breaks its schema.

        Args:
            is_constrained: whether a grammar has chosen the text.
        """
        ...

    def close(self, *, is_cut: bool) -> bool:
        """Read the end of the reply. Return as `feed`.

        Args:
            is_cut: whether the reply was cut, so that its last call may be incomplete.
        """
        ...


@dataclass(frozen=True)
class Output:
    """Holds the options of a reply that do not concern sampling.

    Attributes:
        stop_ids: tokens that end the reply. None: the engine's stop ids.
        grammar: the grammar of the reply. The reply ends with "stop" only where the grammar may end.
        calls: the grammar of calls in the reply, which may have other text around them.
        follow_calls: returns a reader for the calls of a new reply. Calls that break their schemas are drawn again, by
            the grammar `calls`. None: they stay as they are.
        logprobs: how many alternatives are reported with each token, with log probabilities. None: no log probabilities
            at all.
        shows_special: special tokens appear in the text by their names, except those that end the reply.
        hidden_ids: special tokens that have no text, even if others have.
        continues_text: the reply's text goes on from that of the prompt, so it keeps a space before its first word.
            Otherwise SentencePiece's tokenizers leave it out, as at the beginning of a text.
        reports_end: whether the token that ends the reply has a log probability as well, although it has no text.
        prompt_logprobs: how many alternatives are reported with each token of the prompt, with log probabilities. None:
            the prompt is not scored. Tokens that are scored are computed, even if a cached prefix has them.
        scored_from: the index in the prompt of the first token that is scored. The first token of a sequence has no
            log probability.
    Raises:
        BatchError: a wrong value. The message names the option and the value.
    """

    stop_ids: Iterable[int] | None = None
    grammar: Grammar | None = None
    calls: CallGrammar | None = None
    follow_calls: Callable[[], CallReader] | None = None
    logprobs: int | None = None
    shows_special: bool = False
    hidden_ids: frozenset[int] = frozenset()
    continues_text: bool = False
    reports_end: bool = False
    prompt_logprobs: int | None = None
    scored_from: int = 1

    def __post_init__(self) -> None:
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise BatchError(f"grammar={self.grammar!r}; give what chat.sampling.grammar.Grammars has read, or None")
        for name in ("logprobs", "prompt_logprobs"):
            n_top = getattr(self, name)
            if n_top is not None and not (is_integer(n_top, 0) and n_top <= MOST_LOGPROBS):
                raise BatchError(f"{name}={n_top!r}; give 0 ... {MOST_LOGPROBS} alternatives, or None for none at all")
        if not is_integer(self.scored_from, 1):
            raise BatchError(f"scored_from={self.scored_from!r}; give an index of at least 1 in the prompt")

    @property
    def end_ids(self) -> tuple[int, ...]:
        assert isinstance(self.stop_ids, tuple), "read when the request was made"
        return self.stop_ids

    def read(self, end_ids: tuple[int, ...], vocab_size: int) -> Output:
        """Return this output with the tokens that end the reply. `end_ids` are the engine's. Raises BatchError."""
        ids = end_ids if self.stop_ids is None else read_stop_ids(self.stop_ids, vocab_size)
        return replace(self, stop_ids=ids)


PLAIN = Output()
