"""Decides the form of a reply and how it is read, with its grammar, its thoughts and its calls of tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from hybridmem.chat.engine.output import CallReader, Output
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.sampling.grammar import GrammarError, Grammars
from hybridmem.chat.sampling.token_bytes import TokenBytes
from hybridmem.chat.sampling.triggers import CallGrammar
from hybridmem.chat.server.errors import ApiError, log
from hybridmem.chat.server.tool_fields import ToolFields
from hybridmem.chat.tools.calls import CallFormat
from hybridmem.chat.tools.checking import CallCheck, CheckedReply
from hybridmem.chat.tools.families import BARE, find_habits
from hybridmem.chat.tools.grammars import Required, Shape, make_calls_grammar, make_grammar, with_enforced_schema
from hybridmem.chat.tools.reading import Reader, make_reader
from hybridmem.chat.tools.tool_schemas import left_out_of
from hybridmem.memory import SpecError
from hybridmem.memory.sequences import plain_ids

_LACKING = {
    "reasoning_content": "this model's chat template does not show earlier thoughts",
    "tool_calls": "this model's chat template does not show earlier calls",
    "tools": "this model's chat template does not show tools",
}
NewReader = Callable[[], Reader]
_TAIL_TOKENS = 8


class Shaping:
    """Makes grammars and readers for the replies of one model. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int, end_ids: tuple[int, ...]) -> None:
        self.habits = find_habits(tokenizer)
        self._grammars = Grammars(tokenizer, n_vocab, end_ids, is_guarded=True)
        self._tokens = TokenBytes(tokenizer)
        self._thread = ThreadPoolExecutor(1, "grammars")

    def close(self) -> None:
        """End the process that tries the grammars of clients, and the thread that compiles them."""
        self._grammars.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def is_thinking(self, texts: Tokenizer, token_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends with the mark that begins thoughts.

        Args:
            texts: a tokenizer for this thread.
        """
        end = str(texts.decode(plain_ids(token_ids[-_TAIL_TOKENS:]), skip_special_tokens=False)).rstrip()
        return self.habits.thinks and end.endswith(self.habits.thoughts.begin.strip())

    async def shape(
        self, shape: Shape | None, asked: ToolFields, *, is_thinking: bool = False, logprobs: int | None = None
    ) -> tuple[Output, NewReader]:
        """Return the options for the engine, and a function that makes a reader for each choice.

        A new grammar is compiled in a thread of its own, where neither other requests nor the engine wait for it.

        Args:
            is_thinking: whether the prompt ends with the mark that begins thoughts.
        Raises:
            ApiError: 400 if something cannot be enforced, before anything is generated. The message names it.
        """
        work = partial(self._shape, shape, asked, is_thinking=is_thinking, logprobs=logprobs)
        if shape is None and not asked.callable_tools():
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _shape(
        self, shape: Shape | None, asked: ToolFields, *, is_thinking: bool, logprobs: int | None
    ) -> tuple[Output, NewReader]:
        habits, tools = self.habits, asked.callable_tools()
        calls: CallFormat | None = habits.calls if tools else None
        if asked.must_call:
            calls = calls or BARE
        required = Required(tools, calls, is_parallel=asked.parallel_tool_calls) if calls is not None else None
        param = "tools" if asked.must_call or shape is None else shape.name
        try:
            grammar = make_grammar(
                self._grammars, habits, shape, required, must_call=asked.must_call, is_thinking=is_thinking
            )
        except GrammarError as error:
            raise ApiError(400, f"Invalid '{param}': {error}.", param=param, code="invalid_value") from None
        except SpecError as error:
            message = f"Unsupported parameter: '{param}': {error}."
            raise ApiError(400, message, param=param, code="unsupported_parameter") from None
        begun, follow = None, None
        if grammar is None and required is not None:
            begun, follow = self._free_calls(required, is_thinking=is_thinking)
        output = Output(
            grammar=grammar,
            calls=begun,
            follow_calls=follow,
            logprobs=logprobs,
            shows_special=habits.shows_special,
            hidden_ids=habits.hidden_ids(calls),
        )
        return output, partial(make_reader, habits, asked.offered_tools, calls, is_thinking=is_thinking)

    def _free_calls(
        self, calls: Required, *, is_thinking: bool
    ) -> tuple[CallGrammar | None, Callable[[], CallReader] | None]:
        """Return the grammar of calls that the reply need not make, and a check for calls that do not keep to it.

        If no grammar is possible, calls are unconstrained.
        """
        try:
            return self._checked_calls(calls, is_thinking=is_thinking)
        except GrammarError as error:
            log.info("not all calls are constrained: %s", error)
        except SpecError as error:
            log.info("calls are not constrained: %s", error)
            return None, None
        tools = [with_enforced_schema(self._grammars, tool) for tool in calls.tools]
        try:
            return self._checked_calls(replace(calls, tools=tools), is_thinking=is_thinking)
        except GrammarError as error:
            log.info("calls are not constrained: %s", error)
            return None, None

    def _checked_calls(
        self, calls: Required, *, is_thinking: bool
    ) -> tuple[CallGrammar | None, Callable[[], CallReader] | None]:
        begun = make_calls_grammar(self._grammars, self.habits, calls, self._tokens, is_thinking=is_thinking)
        if begun is None:
            return None, None
        check = CallCheck.of(self._grammars, calls)
        return begun, partial(CheckedReply, check, self.habits, calls.format, is_thinking=is_thinking)

    def notes_on(self, asked: ToolFields, messages: Sequence[Mapping[str, Any]] = ()) -> list[str]:
        """Say which of a request's tools, calls and thoughts do not reach the model or are not enforced."""
        notes = [note for tool in asked.offered_tools for note in left_out_of(tool)]
        lacks = {name for name in self.habits.lacks if any(message.get(name) for message in messages)}
        if self.habits.write_calls is not None:
            lacks.discard("tool_calls")
        if asked.offered_tools and "tools" in self.habits.lacks:
            lacks.add("tools")
        return [*notes, *(f"{name}: {_LACKING[name]}" for name in sorted(lacks))]

    async def plain(self, shape: Shape | None, logprobs: int | None) -> Output:
        """Return the options for the engine, for text that continues a prompt. Raises ApiError as `shape`.

        The token that ends a reply has a log probability, too. So a client that asks for one token always gets one.
        """
        if shape is None:
            return Output(logprobs=logprobs, continues_text=True, reports_end=True)
        output, _ = await self.shape(shape, ToolFields(), logprobs=logprobs)
        return Output(grammar=output.grammar, logprobs=logprobs, reports_end=True)
