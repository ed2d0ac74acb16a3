"""No client delays others by bodies that are large or full of small things, or by long texts."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions, checked, guard, incoming
from hybridmem.chat.server.bodies import count_longest_list
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.schema import MOST_MESSAGES, MOST_VALUES, ChatRequest, CompletionRequest, read_request
from hybridmem.chat.server.texts import LONG_BYTES, Texts, find_longest_token
from hybridmem.models import LanguageModel
from tests.chat.servers import MODEL, PATIENCE_SECONDS, Running, running, wait_until
from tests.extent import only_in_long

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
LONG = "x" * LONG_BYTES
SCALARS = st.none() | st.booleans() | st.integers() | st.text('",[]{}:\\\\a')
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text('",[a'), inner, max_size=6)
)


class Watched:
    """Is a tokenizer that reports what it is given.

    Texts that begin with x block it while a test says so.
    """

    def __init__(self, tokenizer: Tokenizer, copied: Watched | None = None) -> None:
        self._tokenizer = tokenizer
        self.encoded: list[str] = copied.encoded if copied else []
        self.may_go = copied.may_go if copied else threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __deepcopy__(self, memo: object) -> Watched:
        return Watched(self._tokenizer, self)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.encoded.append(text)
        if text.startswith("x"):
            assert self.may_go.wait(PATIENCE_SECONDS), "the test forgot the gate"
            return [1]
        return list(self._tokenizer.encode(text, **options))


@pytest.fixture
def watched(tokenizer: Tokenizer) -> Iterator[Watched]:
    tokenizer = Watched(tokenizer)
    yield tokenizer
    tokenizer.may_go.set()


def complete(server: Running, text: str) -> int:
    return server.call("POST", "/v1/completions", {"model": MODEL, "prompt": text, "max_tokens": 1}).status


# The tests below send long texts.


def test_a_text_that_no_context_can_hold_is_not_tokenised(embedded: LanguageModel, watched: Watched) -> None:
    with running(embedded, watched, ServerOptions(max_tokens=512)) as server:
        most = 512 * find_longest_token(watched)
        watched.encoded.clear()
        text = "cat " * 200_000
        answers = [server.chat(text), server.call("POST", "/v1/completions", {"model": MODEL, "prompt": ["a", text]})]
        for answer, param in zip(answers, ("messages", "prompt"), strict=True):
            assert (answer.status, answer.error["code"], answer.error["param"]) == (
                400,
                "context_length_exceeded",
                param,
            )
            n_least = re.search(r"at least (\d+) tokens", answer.error["message"])
            assert n_least is not None and 800_000 <= int(n_least[1]) * find_longest_token(watched) < 801_000
            assert "maximum context length is 512 tokens" in answer.error["message"]
        assert watched.encoded == ["a"]
        prompts = ["a " * (most // 4)] * 3  # Each of the prompts may be as long as this.
        answer = server.call("POST", "/v1/completions", {"model": MODEL, "prompt": prompts})
        assert answer.error["code"] == "context_length_exceeded" and watched.encoded[1:] == prompts


def test_no_text_of_the_longest_tokens_is_refused_by_its_bytes(tokenizer: Tokenizer) -> None:
    """No text that fits is refused: the bound allows for the longest tokens of a vocabulary."""
    n_bytes = find_longest_token(tokenizer)
    assert all(len(tokenizer.decode([i]).encode()) <= n_bytes for i in range(len(tokenizer)))
    assert n_bytes == len("<|assistant|>")


def test_short_texts_do_not_wait_for_long_ones(embedded: LanguageModel, watched: Watched) -> None:
    with running(embedded, watched, ServerOptions(max_requests=4)) as server, ThreadPoolExecutor(4) as clients:
        long = [clients.submit(complete, server, f"{LONG}{i}") for i in range(3)]
        refused = next(as_completed(long, timeout=PATIENCE_SECONDS))
        assert refused.result() == 429  # Half of the places are kept for other requests.
        wait_until(lambda: any(text.startswith("x") for text in watched.encoded))
        assert [complete(server, "My") for _ in range(3)] == [200] * 3
        watched.may_go.set()
        assert [answer.result() for answer in long if answer is not refused] == [200, 200]
        assert complete(server, LONG) == 200


def test_a_turn_comes_by_waiting_and_by_bytes(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is the test's own.

    So requests that come together come at one time, however busy the machine is.
    """
    texts, now = Texts(watched, 512, max_long=9), [0.0]
    done: list[str] = []

    async def use() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])

        def ask(name: str, n_bytes: int) -> asyncio.Task[None]:
            return asyncio.create_task(texts.run(n_bytes, lambda tokenizer: done.append(name)))

        first = asyncio.create_task(texts.run(1, lambda tokenizer: watched.may_go.wait(PATIENCE_SECONDS)))
        await asyncio.sleep(0)
        tasks = {
            name: ask(name, n_bytes)
            for name, n_bytes in {"large": 30_000, "small": 10, "medium": 9000, "gone": 10}.items()
        }
        await asyncio.sleep(0)
        tasks["gone"].cancel()
        now[0] += 0.35
        tasks["late"] = ask("late", 10)
        await asyncio.sleep(0)
        watched.may_go.set()
        await asyncio.gather(first, *tasks.values(), return_exceptions=True)
        await texts.run(1, lambda tokenizer: done.append("last"))

    asyncio.run(use())
    texts.close()
    assert done == ["small", "medium", "large", "late", "last"]


def test_a_client_that_goes_hands_its_turn_over(watched: Watched) -> None:
    texts = Texts(watched, 512, max_long=9)

    async def use(n_loops: int) -> str:
        first = asyncio.create_task(texts.run(1, lambda tokenizer: "first"))
        await asyncio.sleep(0)
        second = asyncio.create_task(texts.run(1, lambda tokenizer: "second"))
        third = asyncio.create_task(texts.run(1, lambda tokenizer: "third"))
        await first
        for _ in range(n_loops):
            await asyncio.sleep(0)
        second.cancel()
        return await asyncio.wait_for(third, PATIENCE_SECONDS)

    for n_loops in range(6):
        assert asyncio.run(use(n_loops)) == "third"
    texts.close()


# The tests below send many small things.


@pytest.mark.parametrize(
    ("model", "value", "code"),
    [
        (ChatRequest, {f"k{i}": 1 for i in range(MOST_VALUES)}, "invalid_json"),
        (ChatRequest, CHAT | {"messages": [{"role": "user", "content": ""}] * (MOST_VALUES // 3 + 1)}, "invalid_json"),
        (ChatRequest, CHAT | {"messages": [{}] * (MOST_MESSAGES + 1)}, "invalid_value"),
        (ChatRequest, [[]] * MOST_VALUES, "invalid_json"),
        (CompletionRequest, {"model": MODEL, "prompt": [[1]] * MOST_VALUES}, "invalid_json"),
        (CompletionRequest, {"model": MODEL, "prompt": [[1]] * (MOST_VALUES // 2)}, "invalid_value"),
        (CompletionRequest, {"model": MODEL, "prompt": ["a"] * (MOST_VALUES // 2)}, "invalid_value"),
    ],
)  # fmt: skip
def test_a_body_of_very_many_things_is_refused(model: Any, value: object, code: str) -> None:
    with pytest.raises(ApiError) as found:
        read_request(model, json.dumps(value).encode())
    assert (found.value.status, found.value.code) == (400, code)


@pytest.mark.parametrize(
    "text", ["[{:" * MOST_VALUES, '\\"[' * MOST_VALUES, '"{' * MOST_VALUES, "\\" * MOST_VALUES + "[{:" * MOST_VALUES]
)
def test_what_texts_say_is_not_counted(text: str) -> None:
    asked = read_request(ChatRequest, json.dumps(CHAT | {"messages": [{"role": "user", "content": text}]}).encode())
    assert asked.messages[0].content == text


@pytest.mark.parametrize("where", [(), ("messages", 0), ("stream_options",)])
def test_one_unknown_key_is_enough(where: tuple[Any, ...]) -> None:
    """The server does not look at the others: an error for each would delay everybody."""
    value: dict[str, Any] = json.loads(json.dumps(CHAT | {"stream": True, "stream_options": {}}))
    inner = value
    for key in where:
        inner = inner[key]
    inner.update({f"k{i}": 1 for i in range(1000)})
    with pytest.raises(ValidationError) as found:
        ChatRequest.model_validate(value)
    assert found.value.error_count() == 1
    with pytest.raises(ApiError, match=r"Unknown parameter: '.*k0'"):
        read_request(ChatRequest, json.dumps(value).encode())


@only_in_long
def test_a_list_that_no_context_can_hold_is_not_parsed(
    embedded: LanguageModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    parse = checked.from_json
    monkeypatch.setattr(
        checked, "from_json", lambda body, **options: parsed.append(len(body)) or parse(body, **options)
    )
    with running(embedded, tokenizer, ServerOptions(max_tokens=512, max_body_bytes=16 << 20)) as server:
        token_ids = [5] * 1_000_000
        for prompt in (token_ids, [[5], token_ids]):
            answer = server.call("POST", "/v1/completions", {"model": MODEL, "prompt": prompt})
            assert (answer.status, answer.error["code"], answer.error["param"]) == (
                400,
                "context_length_exceeded",
                "prompt",
            )
            assert "512 tokens" in answer.error["message"] and "1000000 tokens" in answer.error["message"]
        answer = server.call("POST", "/v1/chat/completions", CHAT | {"messages": token_ids})
        assert (answer.status, answer.error["param"], parsed) == (400, "messages", [])
        stop = [","] * 4
        prompts: tuple[Any, ...] = ([5] * 511, [[5] * 511] * 2, "," * 300)
        for prompt in prompts:  # There are many commas, but not too many.
            assert (
                server.call(
                    "POST", "/v1/completions", {"model": MODEL, "prompt": prompt, "stop": stop, "max_tokens": 1}
                ).status
                == 200
            )
        assert len(parsed) == 3


@given(JSON)
def test_no_list_is_called_longer_than_it_is(value: object) -> None:
    def longest(value: object) -> int:
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        return max([len(value) if isinstance(value, list) else 0, *map(longest, inner)])

    assert count_longest_list(json.dumps(value).encode(), 2) <= longest(value)


# The tests below are about bodies on their way in.


def test_large_bodies_come_in_slowly_while_somebody_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def take_turns(places: guard.Places) -> None:
        turnstile = incoming.Turnstile(places)
        await asyncio.gather(*(turnstile.wait(n_bytes) for n_bytes in (10, 5)))

    monkeypatch.setattr(incoming, "_LARGE_BYTES_PER_SECOND", 100)
    monkeypatch.setattr(incoming, "sleep", sleep)
    asyncio.run(take_turns(guard.Places(1)))
    asyncio.run(take_turns(guard.Places(1, n_taken=1)))
    assert slept == [0, 0, 0.1, 0.05]
