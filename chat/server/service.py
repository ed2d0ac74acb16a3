"""Answers requests with the engine's replies, and keeps the engine stepping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.chat.engine.output import Output
from hybridmem.chat.prompts import Message, Tokenizer
from hybridmem.chat.sampling.defaults import read_defaults
from hybridmem.chat.sampling.token_bytes import TokenBytes
from hybridmem.chat.server.asking import Asking
from hybridmem.chat.server.chat_format import ChatFormat
from hybridmem.chat.server.chat_prompts import encode_messages
from hybridmem.chat.server.courier import Courier
from hybridmem.chat.server.errors import ApiError, StoppingError, as_api_error, log, stopping
from hybridmem.chat.server.formats import CompletionFormat, EventStream
from hybridmem.chat.server.guard import Exchange, exchange_of
from hybridmem.chat.server.lengths import check_length, check_lists, find_context_tokens
from hybridmem.chat.server.memory_view.events import MemoryView
from hybridmem.chat.server.metrics import Metrics
from hybridmem.chat.server.options import ServerOptions
from hybridmem.chat.server.owners import Owners
from hybridmem.chat.server.pictures import Sight
from hybridmem.chat.server.replies import Piece, PromptRequest, Replies
from hybridmem.chat.server.schema import ChatRequest, CommonRequest, CompletionRequest, Prompt, read_request
from hybridmem.chat.server.shaping import NewReader, Shaping
from hybridmem.chat.server.streams import OpenAIWriter, Style, Writer, first_piece, write_stream
from hybridmem.chat.server.texts import LONG_BYTES, Texts
from hybridmem.memory import CapacityError, FormatError, IntegrityError
from hybridmem.models.vision.pictures import Pictures


class Whole(Protocol):
    """Declares how a whole reply is written in one dialect."""

    def whole(self, generations: list[Generation], usage: dict[str, object]) -> dict[str, Any]: ...


class Watcher(Protocol):
    """Declares the interface of an object that records chats."""

    def watch(self, request: Request, asked: ChatRequest, token_ids: list[int], new_reader: NewReader) -> None: ...
    def watch_items(
        self, request: Request, asked: Any, items: list[dict[str, Any]], token_ids: list[int], new_reader: NewReader
    ) -> None: ...


class Service:
    """Serves one model at all paths.

    Args:
        tokenizer: the engine's tokenizer.
        model_id: the name by which clients call the model.
    Attributes:
        recorder: records chats. None: they are not stored.
        is_open: whether the service answers requests, as it does from the beginning of `lifespan` until `close`.
        context_tokens: the tokens that a prompt and its reply may have together. context_bytes: the bytes of the budget
            that so many tokens take.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, model_id: str, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        self.model_id = model_id
        self.metrics = Metrics(engine, model_id)
        self.memory_view = MemoryView(self)
        self.is_open = False
        self.owners = Owners.of(options)
        self.context_tokens = find_context_tokens(engine, options.max_tokens)
        self.context_bytes = engine.memory.counters.bytes_at(self.context_tokens)
        self.asking = Asking(
            engine.stop_ids, engine.memory.spec.vocab_size, options.sampling or read_defaults(tokenizer)
        )
        found = getattr(engine.model, "pictures", None)
        self.sight = Sight(found if isinstance(found, Pictures) else None, options)
        self.recorder: Watcher | None = None
        self.tokens = TokenBytes(tokenizer)
        self.shaping = Shaping(tokenizer, engine.memory.spec.vocab_size, engine.stop_ids)
        self._created = int(time.time())
        self._live: set[Replies] = set()
        self.texts = Texts(
            tokenizer, self.context_tokens, max(1, options.max_requests // 2), self.shaping.habits.write_calls
        )  # fmt: skip

    # The methods below run from the server's start to its end.

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        self._courier = Courier[Piece](asyncio.get_running_loop())
        tasks = [asyncio.create_task(work) for work in (self._keep_serving(), self.metrics.process.keep_reading())]
        if self.options.save_seconds is not None:
            tasks.append(asyncio.create_task(self._keep_saving(self.options.save_seconds)))
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.engine.end_all(StoppingError())
            self.texts.close()
            self.shaping.close()
            await self._save()

    async def _keep_serving(self) -> None:
        """Step the engine. A failed step ends its requests. The server ends only if the memory is damaged."""
        while True:
            try:
                await self.engine.serve()
            except IntegrityError:
                self.is_open = False
                log.exception("the memory's books do not balance; the server answers no more")
                return
            except Exception:
                log.exception("a step failed; every generation has ended")

    async def _keep_saving(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._save()

    async def _save(self) -> None:
        """Call `options.save` in another thread. A failure is logged, and the server goes on."""
        try:
            if self.options.save is not None:
                await asyncio.to_thread(self.options.save)
        except Exception:
            log.exception("what the server knows could not be saved")

    def close(self) -> None:
        """Refuse new requests, and end those in progress after the grace period. Call it on the event loop."""
        self.is_open = False
        loop = asyncio.get_running_loop()
        loop.call_later(self.options.grace_seconds, self._cancel_all)

    def _cancel_all(self) -> None:
        """Cancel all generations, without taking the lock.

        A thread that steps without a pause could hold it for long.
        """
        for replies in self._live:
            replies.cancel()

    # The methods below answer endpoints.

    async def health(self) -> Response:
        return JSONResponse({"status": "ok"}) if self.is_open else stopping().response()

    async def render_metrics(self) -> Response:
        text = self.metrics.render()  # This call blocks for no lock. Another thread would only add a wait.
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def list_models(self) -> Response:
        """List the model under its name, and under each of its aliases."""
        names = [self.model_id, *(name for name in self.options.alias if not _is_pattern(name))]
        data = [self._model(name) for name in names]
        # Anthropic's clients read the other fields.
        return JSONResponse(
            {"object": "list", "data": data, "first_id": names[0], "last_id": names[-1], "has_more": False}
        )

    async def show_model(self, name: str) -> Response:
        self.check_model(name)
        return JSONResponse(self._model(name))

    async def chat(self, request: Request) -> Response:
        asked, prompt, new_reader = await self.ask_chat(request, partial(read_request, ChatRequest))
        scored = prompt.token_ids if asked.prompt_logprobs is not None else None
        style = ChatFormat(
            asked.model, self.tokens, new_reader, has_reasoning=asked.include_reasoning, scored_prompt=scored
        )
        return await self.reply(exchange_of(request.scope), [prompt], style, _writer(asked, style))

    async def complete(self, request: Request) -> Response:
        asked, prompts = await self.ask_completion(request, partial(read_request, CompletionRequest))
        encoded, echoes = [prompt.token_ids for prompt in prompts], [""] * len(prompts)
        if asked.echo:
            pairs, n_bytes = list(zip(asked.prompt, encoded, strict=True)), len(await request.body())
            echoes = await self.texts.run(n_bytes, lambda texts: [self._text_of(texts, *pair) for pair in pairs])
        style = CompletionFormat(
            asked.model,
            self.tokens,
            prompts=[ids for ids in encoded for _ in range(asked.n)],
            echoes=[echo for echo in echoes for _ in range(asked.n)],
            echoes_logprobs=asked.echo and asked.logprobs is not None,
            has_prompt_logprobs=asked.prompt_logprobs is not None,
        )
        return await self.reply(exchange_of(request.scope), prompts, style, _writer(asked, style))

    # Endpoints use the methods below.

    def _model(self, name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self._created, "owned_by": "hybrid-memory"}
        created_at = datetime.fromtimestamp(self._created, UTC).isoformat()
        about |= {"type": "model", "display_name": self.model_id, "created_at": created_at}
        counters, spec = self.engine.memory.counters, self.engine.memory.spec
        memory = {
            "budget_bytes": counters.budget_bytes, "used_bytes": counters.used_bytes,
            "context_bytes": self.context_bytes, "dtype": str(spec.dtype).removeprefix("torch."),
            "device": str(spec.device),
        }  # fmt: skip
        return about | {"max_model_len": self.context_tokens, "hybrid_memory": memory}

    def check_model(self, name: str) -> None:
        """Raise ApiError 404 unless the model answers to this name."""
        if name != self.model_id and not any(fnmatchcase(name, alias) for alias in self.options.alias):
            message = f"There is no model {name[:100]!r} here; there is {self.model_id!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def ask_chat(
        self, request: Request, read: Callable[[bytes], ChatRequest]
    ) -> tuple[ChatRequest, PromptRequest, NewReader]:
        """Read a chat, in whatever dialect. Raises ApiError.

        Args:
            read: reads the body of the request in its dialect.
        Returns:
            The request, the arguments of the engine, and a function that makes the reader of a reply.
        """
        body = await request.body()
        asked, token_ids, is_thinking = await self.read_chat_of(body, read)
        output, new_reader = await self.form_of(asked, is_thinking=is_thinking)
        messages = [message.as_template_knows() for message in asked.messages]
        notes = [*asked.left_out_of(self.shaping.habits.template), *self.shaping.notes_on(asked, messages)]
        exchange_of(request.scope).note_left_out([*asked.left_out, *notes])
        owner = self.owners.of_prefixes(request.headers.get, asked)
        prompt = self._prompt_request(asked, token_ids, asked.wanted_tokens, owner, output, param="messages")
        if asked.prediction is not None:
            predicted = asked.prediction.content
            ids = await self.texts.run(len(body), lambda texts: texts.encode(predicted, add_special_tokens=False))
            prompt = replace(prompt, prediction=tuple(ids))
        if self.recorder is not None:
            self.recorder.watch(request, asked, token_ids, new_reader)
        return asked, self.with_thoughts(prompt, new_reader), new_reader

    def encode_chat(self, texts: Tokenizer, asked: ChatRequest, messages: list[Message]) -> list[int]:
        """Return the tokens of a chat. Raises FormatError if the template refuses it."""
        return encode_messages(
            texts, messages, parse_special=self.options.parse_special, continues=asked.continue_final_message,
            thoughts=self.shaping.habits.thoughts,
        )  # fmt: skip

    async def ask_completion(
        self, request: Request, read: Callable[[bytes], CompletionRequest]
    ) -> tuple[CompletionRequest, list[PromptRequest]]:
        """Read prompts that are to be continued, in whatever dialect, as `ask_chat` reads a chat. Raises ApiError."""
        body = await request.body()
        asked, encoded = await self.texts.run(
            len(body), lambda texts: self._read_completion(texts, body, read), param="prompt"
        )
        output = await self.shaping.plain(asked.shape, asked.n_logprobs)
        exchange_of(request.scope).note_left_out(asked.left_out)
        owner = self.owners.of_prefixes(request.headers.get, asked)
        prompts = [self._prompt_request(asked, ids, asked.max_tokens, owner, output, param="prompt") for ids in encoded]
        return asked, prompts

    async def read_chat_of(
        self, body: bytes, read: Callable[[bytes], ChatRequest]
    ) -> tuple[ChatRequest, list[int], bool]:
        """Call `read_chat` in a thread of texts. If there seem to be pictures, it is the thread of long texts."""
        n_bytes = max(len(body), LONG_BYTES + 1) if self.sight.is_likely(body) else len(body)
        return await self.texts.run(n_bytes, lambda texts: self.read_chat(texts, body, read), param="messages")

    def read_chat(
        self, texts: Tokenizer, body: bytes, read: Callable[[bytes], ChatRequest]
    ) -> tuple[ChatRequest, list[int], bool]:
        """Read a request and its tokens, and whether they end in the middle of thoughts. Raises ApiError."""
        check_lists(body, self.context_tokens, param="messages")
        with self.sight.collecting() as sources:
            asked = read(body)
        self.check_model(asked.model)
        asked.hold(self.sight.read(sources, texts, param="messages"))
        if sources and asked.prompt_logprobs is not None:
            message = "'prompt_logprobs' are not possible with pictures: their rows are no tokens."
            raise ApiError(400, message, param="prompt_logprobs", code="unsupported_value")
        try:
            messages = [message.as_template_knows() for message in asked.messages]
            texts = asked.with_template(texts.with_pictures(asked.seen), self.shaping.habits.template)
            token_ids = self.encode_chat(texts, asked, messages)
        except FormatError as error:
            raise ApiError(400, f"{error}.", param="messages", code="invalid_value") from None
        return asked, token_ids, self.shaping.is_thinking(texts, token_ids)

    async def form_of(self, asked: ChatRequest, *, is_thinking: bool) -> tuple[Output, NewReader]:
        """Return the form of a reply, and a function that makes its reader. Raises ApiError."""
        output, new_reader = await self.shaping.shape(
            asked.shape, asked, is_thinking=is_thinking, logprobs=asked.n_logprobs
        )
        if asked.continue_final_message:
            output = replace(output, continues_text=True)
        return output, new_reader

    def _read_completion(
        self, texts: Tokenizer, body: bytes, read: Callable[[bytes], CompletionRequest]
    ) -> tuple[CompletionRequest, list[list[int]]]:
        """Read a request and the tokens of its prompts. Raises ApiError."""
        check_lists(body, self.context_tokens, param="prompt")
        asked = read(body)
        self.check_model(asked.model)
        for prompt in asked.prompt:
            if not isinstance(prompt, str):  # A prompt with too many token ids is refused before any text is encoded.
                self._reply_tokens(len(prompt), asked.max_tokens, param="prompt")
        encoded = [self.encode(texts.for_another_prompt(), prompt, "prompt") for prompt in asked.prompt]
        return asked, encoded

    @property
    def n_vocab(self) -> int:
        return self.engine.memory.spec.vocab_size

    def encode(self, texts: Tokenizer, prompt: Prompt, param: str) -> list[int]:
        """Return the tokens of a text; given tokens stay as they are.

        Raises ApiError if there are no tokens, or unknown ones.
        """
        token_ids = list(texts.encode(prompt)) if isinstance(prompt, str) else prompt
        if not token_ids:
            message = f"Invalid '{param}': it has no tokens; give some text."
            raise ApiError(400, message, param=param, code="invalid_value")
        if not (0 <= min(token_ids) and max(token_ids) < self.n_vocab):
            message = f"Invalid '{param}': token ids must be 0 ... {self.n_vocab - 1}."
            raise ApiError(400, message, param=param, code="invalid_value")
        return token_ids

    def _text_of(self, texts: Tokenizer, prompt: Prompt, token_ids: list[int]) -> str:
        return prompt if isinstance(prompt, str) else str(texts.decode(token_ids, skip_special_tokens=True))

    def _prompt_request(
        self, asked: ChatRequest | CompletionRequest, token_ids: list[int], wanted: int | None, owner: bytes,
        output: Output, *, param: str
    ) -> PromptRequest:  # fmt: skip
        n_reply = self._reply_tokens(len(token_ids), wanted, param=param)
        if asked.n_prompt_logprobs is not None:
            output = replace(output, prompt_logprobs=asked.n_prompt_logprobs)
        return self.asking.prompt_request(
            asked, token_ids, n_reply, owner, n=asked.n, output=output,
            reports_prefill=asked.stream and asked.return_progress,
        )  # fmt: skip

    def with_thoughts(self, prompt: PromptRequest, new_reader: NewReader) -> PromptRequest:
        """Return `prompt` with a function that counts the thoughts in its replies."""
        if not self.shaping.habits.thinks:
            return prompt
        return replace(prompt, count_thoughts=partial(new_reader().count_thoughts, self.tokens.of))

    def _reply_tokens(self, n_prompt: int, wanted: int | None, *, param: str) -> int:
        limit, is_cut = self.context_tokens, param != "prompt"
        return check_length(n_prompt, wanted, self.options.default_tokens, limit, param=param, is_cut=is_cut)

    def begin(self, exchange: Exchange, prompts: list[PromptRequest]) -> Replies:
        """Submit the requests. They are cancelled when the exchange ends. Raises ApiError."""
        if not self.is_open:
            raise stopping()
        exchange.take_place()
        try:
            replies = Replies(self.engine, prompts, self.metrics, self._courier, exchange.started, exchange.more_usage)
        except CapacityError as error:  # This is permanent, so trying again would not help.
            raise ApiError(400, f"{error}.", code="context_length_exceeded") from None
        self._live.add(replies)
        exchange.replies = replies
        exchange.at_end += [
            replies.cancel, lambda: self._live.discard(replies), lambda: exchange.charge(replies.usage())
        ]  # fmt: skip
        return replies

    async def run(self, exchange: Exchange, prompts: list[PromptRequest]) -> Replies:
        """Generate replies to their ends. Raises ApiError."""
        replies = self.begin(exchange, prompts)
        try:
            while await replies.next() is not None:
                pass
        except Exception as error:
            raise as_api_error(error) from None
        return replies

    async def reply(
        self, exchange: Exchange, prompts: list[PromptRequest], form: Whole, writer: Writer | None, *,
        media_type: str = EventStream.media_type
    ) -> Response:  # fmt: skip
        """Generate a reply, as a stream if there is a writer for it. Raises ApiError."""
        if writer is not None:
            replies = self.begin(exchange, prompts)
            try:
                return EventStream(write_stream(replies, await first_piece(replies), writer), media_type)
            except Exception as error:
                raise as_api_error(error) from None
        replies = await self.run(exchange, prompts)
        generations = [generation for _, generation in sorted(replies.generations.items())]
        return JSONResponse(form.whole(generations, replies.usage()))


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _writer(asked: CommonRequest, style: Style) -> Writer | None:
    """Return the writer of the stream that a request of OpenAI's clients asks for, or None if it asks for no stream."""
    if not asked.stream:
        return None
    return OpenAIWriter(style, asked.includes_usage, asked.includes_continuous_usage)
