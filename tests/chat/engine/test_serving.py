"""The engine runs beside an event loop, with streams, consumers that go away, and models that break."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

import pytest

from hybridmem.chat.engine.engine import Engine, Generation, Sampling
from hybridmem.chat.prompts import Tokenizer, encode_prompt, find_stop_ids
from hybridmem.memory import BatchError, HybridMemory, StepError
from hybridmem.models import LanguageModel
from tests.chat.engines import Scripted, decode_alone, draw_prompt, make_engine
from tests.chat.servers import PATIENCE_SECONDS
from tests.toy import VOCAB, Toy

TEXTS = ["My cat is called Zoe.", "What is my dog called?", "I read a book today.", "My lucky number is 23."]


@pytest.fixture
def engine(embedded: LanguageModel, tokenizer: Tokenizer) -> Engine:
    return Engine(
        embedded, HybridMemory(embedded.memory_spec, "64MiB", poison=True), tokenizer, step_tokens=48, max_running=8
    )


def served(engine: Engine, use: Callable[[], Awaitable[None]]) -> None:
    """Run `use` while the engine is served. Nothing may hang."""

    async def both() -> None:
        server = asyncio.create_task(engine.serve())
        try:
            await asyncio.wait_for(use(), PATIENCE_SECONDS)
        finally:
            server.cancel()
            with suppress(asyncio.CancelledError):
                await server
        engine.memory.check()

    asyncio.run(both())


async def until(is_true: Callable[[], bool]) -> None:
    latest = time.monotonic() + PATIENCE_SECONDS
    while not is_true():
        assert time.monotonic() < latest, "it never came true"
        await asyncio.sleep(0.001)


def test_streams_say_what_each_would_say_alone(engine: Engine, tokenizer: Tokenizer) -> None:
    prompts = [encode_prompt(tokenizer, text, is_chat=True) for text in TEXTS]

    async def collect(prompt: list[int], delay_s: float) -> list[str]:
        await asyncio.sleep(delay_s)
        return [piece async for piece in engine.stream(prompt, max_tokens=32)]

    async def use() -> None:
        replies = await asyncio.gather(*(collect(prompt, 0.02 * i) for i, prompt in enumerate(prompts)))
        for prompt, pieces in zip(prompts, replies, strict=True):
            ids = decode_alone(engine.model, prompt, 32, stop_ids=find_stop_ids(tokenizer, engine.model))
            assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
            assert "" not in pieces and len(pieces) > 1

    served(engine, use)
    assert engine.is_idle and engine.memory.usage().used_bytes == 0


@pytest.mark.parametrize("way", ["break", "cancel"])
def test_a_consumer_who_goes_away_frees_the_bytes(embedded: LanguageModel, tokenizer: Tokenizer, way: str) -> None:
    script = tokenizer.encode("All work and no play. ", add_special_tokens=False)
    memory = HybridMemory(embedded.memory_spec, "64MiB", poison=True)
    engine = Engine(Scripted(embedded, script, n_prompt=1), memory, tokenizer)  # type: ignore[arg-type]
    told: list[str | None] = []

    async def listen(n_pieces: int) -> None:
        async with aclosing(
            engine.stream([1], max_tokens=10**6, on_token=lambda g, piece: told.append(g.finish_reason))
        ) as pieces:
            async for _ in pieces:
                n_pieces -= 1
                if n_pieces == 0:
                    return

    async def use() -> None:
        if way == "break":
            await listen(3)
        else:
            task = asyncio.create_task(listen(10**6))
            await until(lambda: len(told) > 3)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await until(lambda: engine.is_idle)

    served(engine, use)
    assert memory.usage().used_bytes == 0 and told[-1] == "cancelled" and len(told) < 10**4


def test_a_stream_that_is_refused_says_so_and_leaves_nothing(engine: Engine) -> None:
    async def use() -> None:
        with pytest.raises(BatchError, match="max_tokens=-1"):
            async for _ in engine.stream([1], max_tokens=-1):
                pass
        assert engine.is_idle

    served(engine, use)


def test_a_model_that_breaks_ends_every_stream_with_its_error() -> None:
    scripted = Scripted(Toy(), [3], n_prompt=1)
    engine = make_engine(scripted)

    async def listen() -> list[str]:
        return [piece async for piece in engine.stream([1], max_tokens=10**6)]

    async def both() -> None:
        server = asyncio.create_task(engine.serve())
        generation = engine.submit([2], max_tokens=10**6)
        task = asyncio.create_task(listen())
        await until(lambda: bool(generation.token_ids) and engine.load.running == 2)
        scripted.fails = True
        for waits in (task, server):
            with pytest.raises(RuntimeError, match="the model broke"):
                await asyncio.wait_for(waits, PATIENCE_SECONDS)
        assert generation.finish_reason == "error" and str(generation.error) == "the model broke"

    asyncio.run(both())
    assert engine.is_idle and engine.memory.usage().used_bytes == 0
    engine.memory.check()


def test_serving_goes_on_where_it_was_cancelled() -> None:
    engine = make_engine(Toy())
    generation = engine.submit([1], max_tokens=300)

    async def some() -> None:
        await until(lambda: len(generation.token_ids) > 5)

    served(engine, some)
    n_tokens = len(generation.token_ids)
    assert not generation.is_finished, "300 steps were faster than the event loop"
    time.sleep(0.05)
    assert len(generation.token_ids) == n_tokens, "a step was left running"

    async def rest() -> None:
        with pytest.raises(StepError, match="already"):
            await engine.serve()
        await until(lambda: generation.is_finished)

    served(engine, rest)
    assert generation.token_ids == decode_alone(Toy(), [1], 300)


def test_an_idle_server_wakes_up_for_each_request() -> None:
    engine = make_engine(Toy())

    async def use() -> None:
        for i in range(5):
            await asyncio.sleep(0.005)
            # Without a tokenizer there is no text, only an end.
            assert [piece async for piece in engine.stream([i], max_tokens=3)] == []
        assert engine.stats.finished == {"length": 5}

    served(engine, use)


def test_threads_may_submit_and_cancel_while_another_steps() -> None:
    engine = make_engine(Toy(), max_running=8, step_tokens=32)
    wanted: list[tuple[Generation, list[int], Sampling]] = []
    is_done = threading.Event()

    def use(seed: int) -> None:
        generator = random.Random(seed)
        longest = engine.submit([seed], max_tokens=10**6)  # Only a cancellation ends it.
        wanted.append((longest, [seed], Sampling()))
        for _ in range(24):
            prompt, sampling = (
                draw_prompt(generator, generator.randint(1, 30), VOCAB),
                Sampling(1.0, seed=generator.randrange(99)),
            )
            generation = engine.submit(prompt, max_tokens=generator.randint(1, 12), sampling=sampling)
            wanted.append((generation, prompt, sampling))
            if generator.random() < 0.4:
                engine.cancel(generator.choice(wanted)[0])
            is_done.wait(generator.random() * 0.004)
        engine.cancel(longest)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or not engine.is_idle:
        engine.step()
        with engine.lock:
            engine.memory.check()
    assert engine.memory.usage().used_bytes == 0 and len(wanted) == 75
    assert {generation.finish_reason for generation, *_ in wanted} == {"length", "cancelled"}
    for generation, prompt, sampling in wanted:
        n_tokens = len(generation.token_ids)
        assert generation.token_ids == decode_alone(Toy(), prompt, n_tokens, sampling)
