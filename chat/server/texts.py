"""Turns texts into tokens in threads, outside of the event loop. Short texts do not wait for long ones.

The tokenizers of transformers let other threads run while they work. So two threads are enough: one for short texts,
and one in which long texts wait for each other. Each thread has a tokenizer of its own, since two threads cannot share
one. In each thread, the earliest text goes first, but a long text counts as later, by one second for a certain number
of bytes.
"""

from __future__ import annotations

import asyncio
import copy
import heapq
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

from hybridmem.chat.prompts import Message, Tokenizer
from hybridmem.chat.server.errors import ContextError, too_many
from hybridmem.chat.special_tokens import PromptContext, WrappedTokenizer
from hybridmem.chat.special_tokens.marks import KnownPictures

T = TypeVar("T")

LONG_BYTES = 32 << 10
"""Bodies with more bytes than this are processed one at a time."""
_BYTES_PER_SECOND = 100_000


class Texts:
    """Runs the tokenizer, and refuses texts that cannot fit into a context before they are tokenised.

    Args:
        context_tokens: the tokens that a prompt and its reply may have together.
        max_long: how many requests with long bodies may wait for their turn.
        write_calls: writes the calls of a message into its content, if the chat template leaves them out.
    """

    def __init__(
        self, tokenizer: Tokenizer, context_tokens: int, max_long: int,
        write_calls: Callable[[Message], Message] | None = None,
    ) -> None:  # fmt: skip
        # A tokenizer may change its own state at its first call. So that call is made here, while no other thread uses
        # it.
        tokenizer.encode("a", add_special_tokens=False)
        self.context_tokens = context_tokens
        self._max_long = max_long
        self._write_calls = write_calls
        self._n_long = 0
        self._short = _Lane(tokenizer, "texts")
        self._long: _Lane | None = None
        self._making_long = asyncio.Lock()

    async def run(self, n_bytes: int, work: Callable[[Tokenizer], T], *, param: str | None = None) -> T:
        """Do the work of a request in a thread.

        Args:
            n_bytes: the bytes of the request's body.
            work: a function that gets a tokenizer. The tokenizer's `encode` refuses texts that are too long.
            param: the field that holds the texts.
        Raises:
            ApiError: 400 for texts that are too long, 429 if too many long ones wait. Whatever the work raises.
        """
        is_long = n_bytes > LONG_BYTES
        if is_long and self._n_long >= self._max_long:
            raise too_many("long texts", n=self._n_long, n_bytes=LONG_BYTES)
        self._n_long += is_long
        try:
            lane = await self._lane_of_long() if is_long else self._short
            return await lane.run(n_bytes, partial(work, _Bounded(lane.tokenizer, self, param, self.context(param))))
        finally:
            self._n_long -= is_long

    def close(self) -> None:
        for lane in (self._short, self._long):
            if lane is not None:
                lane.thread.shutdown(wait=False, cancel_futures=True)

    async def _lane_of_long(self) -> _Lane:
        """Return the thread of long texts.

        It is made for the first long text, because a copy of a large vocabulary takes a second.

        The copy is made in the turn of a short text, so that nobody uses the tokenizer meanwhile.
        """
        async with self._making_long:
            if self._long is None:
                tokenizer = await self._short.run(0, partial(copy.deepcopy, self._short.tokenizer))
                self._long = _Lane(tokenizer, "long-texts")
            return self._long

    @cached_property
    def longest_token_bytes(self) -> int:
        """Return what `find_longest_token` finds. For a vocabulary of 262,144 tokens it takes a third of a second."""
        return find_longest_token(self._short.tokenizer)

    def context(self, param: str | None) -> PromptContext:
        """Return what a prompt of the field `param` needs beside the tokenizer, without options and pictures."""
        return PromptContext(
            write_calls=self._write_calls, check_text=lambda text: self.check_bytes(_count_bytes(text), param)
        )

    def check_bytes(self, n_bytes: int, param: str | None) -> None:
        """Refuse a text by its length. Raises ContextError."""
        # A token stands for a byte at least, so most texts need no look at the vocabulary.
        if n_bytes > self.context_tokens and n_bytes > self.context_tokens * self.longest_token_bytes:
            n_least = -(-n_bytes // self.longest_token_bytes)
            raise ContextError(n_least, self.context_tokens, param=param, is_counted=False)


class _Lane:
    """Holds a thread with a tokenizer of its own, and the requests that wait for it."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.tokenizer = tokenizer
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._n_waited = 0
        self._is_busy = False

    async def run(self, n_bytes: int, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        if self._is_busy:
            turn: asyncio.Future[None] = loop.create_future()
            self._n_waited += 1
            heapq.heappush(self._waiting, (loop.time() + n_bytes / _BYTES_PER_SECOND, self._n_waited, turn))
            try:
                await turn
            except asyncio.CancelledError:
                # This request was cancelled after it had got its turn, so the next request gets the turn.
                if turn.done() and not turn.cancelled():
                    self._hand_over()
                raise
        self._is_busy = True
        working = loop.run_in_executor(self.thread, work)
        working.add_done_callback(lambda _: self._hand_over())
        return await working

    def _hand_over(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False


class _Bounded(WrappedTokenizer):
    """Refuses a text, before tokenising, if the prompt would have more bytes than its tokens can have."""

    def __init__(self, tokenizer: Tokenizer, texts: Texts, param: str | None, context: PromptContext) -> None:
        super().__init__(tokenizer, context)
        self._texts = texts
        self._param = param
        self._n_bytes = 0

    def with_pictures(self, pictures: KnownPictures) -> _Bounded:
        """Return a new wrapper that knows these pictures."""
        return self._with(replace(self.context, pictures=pictures))

    def with_options(self, options: dict[str, Any]) -> _Bounded:
        """Return a new wrapper for another prompt, with options of the chat template such as its tools."""
        return self._with(replace(self.context, template_options=options))

    def for_another_prompt(self) -> _Bounded:
        return self._with(self._texts.context(self._param))

    def _with(self, context: PromptContext) -> _Bounded:
        return _Bounded(self.bare, self._texts, self._param, context)

    def encode(self, text: str, **options: Any) -> list[int]:
        self._n_bytes += _count_bytes(text)
        self._texts.check_bytes(self._n_bytes, self._param)
        return list(self.bare.encode(text, **options))


def _count_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def find_longest_token(tokenizer: Tokenizer) -> int:
    """Return the most bytes of text for which one token stands. A token's name has at least as many bytes.

    This does not consider text that a tokenizer drops, such as spaces that it joins, or runs of unknown characters.
    """
    names = tokenizer.get_vocab()
    n_most = max(map(len, names))  # A character has four bytes at most, so shorter names need no check.
    return max(_count_bytes(name) for name in names if 4 * len(name) >= n_most)
