"""Joins the generations of one HTTP request into one stream of pieces for the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.chat.engine.requests import GREEDY, RequestOptions
from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.server.courier import Courier
from hybridmem.chat.server.errors import stopping
from hybridmem.chat.server.metrics import Metrics
from hybridmem.chat.server.usage import progress_of, usage_of

WAITING_SECONDS = 10.0
"""While there is no token yet, a stream says so after every so many seconds. Proxies cut connections that say nothing.
"""


@dataclass(frozen=True)
class PromptRequest(RequestOptions):
    """Holds what a client's request wants of the engine for one of its prompts, with the sampling of each choice.

    Attributes:
        count_thoughts: counts how many token ids of a reply are thoughts. None: the model has no thoughts.
    """

    token_ids: list[int]
    samplings: tuple[Sampling, ...] = (GREEDY,)
    _: KW_ONLY
    owner: bytes
    count_thoughts: Callable[[Sequence[int]], int] | None = None


@dataclass(frozen=True)
class Piece:
    """Holds what one step of the engine added to one choice.

    Attributes:
        index: the number of the choice. The choices of the first prompt come first, then those of the second, and so
            on.
        start: the number of characters of the reply before this text.
        is_last: whether this is the choice's last piece. `generation` then says why the reply ended.
        heard_at: when the piece came, in seconds of `time.perf_counter`.
        progress: the progress of the prompt, while there is no token yet; see `usage.progress_of`.
        logprobs: the log probabilities of the new tokens, if they were asked for.
    """

    index: int
    text: str
    generation: Generation
    is_last: bool
    heard_at: float
    start: int = 0
    logprobs: tuple[Chosen, ...] = ()
    progress: dict[str, int] | None = None


class Replies:
    """Submits all choices of all prompts. The code that makes this object must finally call `cancel`, whatever happens.

    The choices of one prompt are one request to the engine, which computes the prompt once.

    Args:
        courier: carries pieces from the engine's thread.
        started: when the request came in, in seconds of `time.perf_counter`.
        more_usage: additional fields of `usage` in "hybrid_memory".
    Raises:
        BatchError: wrong tokens. Nothing has been submitted then.
    """

    def __init__(
        self, engine: Engine, prompts: list[PromptRequest], metrics: Metrics, courier: Courier[Piece], started: float,
        more_usage: dict[str, object],
    ) -> None:  # fmt: skip
        self.prompts = prompts
        self._more_usage = more_usage
        self.generations: dict[int, Generation] = {}
        self._engine = engine
        self._metrics = metrics
        self._started = started
        self._courier = courier
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._heard_at: dict[int, float] = {}
        self._n_choices = sum(len(prompt.samplings) for prompt in prompts)
        self._n_ended = 0
        try:
            for i, prompt in enumerate(prompts):
                self._submit(i)
                metrics.prompt_tokens.inc(len(prompt.token_ids))
        except BaseException:
            self.cancel()
            raise

    def _n_thoughts(self) -> int:
        if not all(generation.is_finished for generation in self.generations.values()):
            return 0
        return sum(
            prompt.count_thoughts(self.generations[self._first(i) + choice].token_ids)
            for i, prompt in enumerate(self.prompts)
            if prompt.count_thoughts is not None
            for choice in range(len(prompt.samplings))
        )

    def _first(self, number: int) -> int:
        """Return the index of a prompt's first choice."""
        return sum(len(prompt.samplings) for prompt in self.prompts[:number])

    def _submit(self, number: int) -> None:
        first, prompt = self._first(number), self.prompts[number]
        n_told, n_characters = [0] * len(prompt.samplings), [0] * len(prompt.samplings)

        def on_token(generation: Generation, text: str) -> None:  # The engine's thread calls this.
            now, is_last, i = time.perf_counter(), generation.is_finished, generation.choice
            is_prefilling = not (generation.token_ids or is_last)
            progress = progress_of(generation, now) if is_prefilling else None
            new = tuple(generation.logprobs[n_told[i] :])
            piece = Piece(first + i, text, generation, is_last, now, n_characters[i], new, progress)
            n_told[i] += len(new)
            n_characters[i] += len(text)
            self._courier.send(self._pieces, piece)

        generations = self._engine.submit_choices(
            prompt.token_ids, prompt.samplings, on_token=on_token, **prompt.options()
        )
        self.generations |= {first + generation.choice: generation for generation in generations}

    async def next(self, seconds: float | None = None) -> Piece | None:
        """Wait for the next piece of any choice. Return None when all have ended.

        Raises:
            The error that ended a generation. ApiError 503: the server stops. TimeoutError: no piece came within so
            many seconds, and nothing has changed.
        """
        if self._n_ended == self._n_choices:
            return None
        if seconds is None:  # So most pieces come, and a timeout makes ten calls for each.
            piece = await self._pieces.get()
        else:
            async with asyncio.timeout(seconds):  # `wait_for` makes a task, which costs a hundredth of a first token.
                piece = await self._pieces.get()
        self._measure(piece)
        if piece.is_last:
            self._n_ended += 1
            self._metrics.observe_end(piece.generation, piece.heard_at - self._started)
            if piece.generation.error is not None:
                raise piece.generation.error
            if piece.generation.finish_reason not in ("stop", "length", "deadline"):
                raise stopping()
        return piece

    async def pieces(self) -> AsyncGenerator[Piece | None, None]:
        """Yield all pieces. Until the first token comes, yield None after every 10 seconds. Raises as `next`."""
        while not self._heard_at:
            try:
                piece = await self.next(WAITING_SECONDS)
            except TimeoutError:
                yield None
                continue
            if piece is None:
                return
            yield piece
        while (piece := await self.next()) is not None:
            yield piece

    def _measure(self, piece: Piece) -> None:
        if piece.progress is not None or not piece.generation.token_ids:
            return
        before = self._heard_at.get(piece.index)
        if before is None:
            self._metrics.first_token_seconds.observe(piece.heard_at - self._started)
        else:
            self._metrics.between_tokens_seconds.observe(piece.heard_at - before)
        self._heard_at[piece.index] = piece.heard_at

    def cancel(self) -> None:
        """End all generations that still run, and free their bytes."""
        for generation in self.generations.values():
            self._engine.cancel(generation)

    def usage(self) -> dict[str, Any]:
        """Return the `usage` field: the numbers of tokens of prompts and replies, and why they were computed.

        A prompt counts once, however many choices it has.

        Thoughts are only counted when all replies have ended.
        """
        firsts = [self.generations[self._first(i)] for i in range(len(self.prompts))]
        usage = usage_of(firsts, self.generations.values())
        usage["completion_tokens_details"]["reasoning_tokens"] = self._n_thoughts()
        usage["hybrid_memory"] |= self._more_usage
        return usage
