"""OpenAI's own client sees the server: what it answers, what it refuses and how, and that it keeps nothing."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions, guard, listening, make_app
from hybridmem.chat.server.keys import Key
from hybridmem.chat.simulation.dialogues import make_dialogue, messages
from hybridmem.memory import HybridMemory
from hybridmem.models import LanguageModel
from tests.chat.engines import scheduler_of
from tests.chat.servers import MODEL, PATIENCE_SECONDS, Gated, Running, running, wait_until

NOTED, UNKNOWN = "Okay, noted.", "You have not told me that."
CAT = [{"role": "user", "content": "My cat is called Zoe."}]
BASE: dict[str, Any] = {"model": MODEL, "messages": CAT}
LIMIT = 512
JSON = {"Content-Type": "application/json"}
RAW_JSON = [(b"content-type", b"application/json")]


@pytest.fixture(scope="module")
def shared(embedded: LanguageModel, tokenizer: Tokenizer) -> Iterator[Running]:
    options = ServerOptions(max_body_bytes=1 << 16, max_tokens=LIMIT, default_tokens=32)
    with running(embedded, tokenizer, options) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """Return a server. After a test, nothing is left on it, and no fault was the server's."""
    shared.forget()
    yield shared
    shared.settle()
    shared.forget()
    assert shared.memory.usage().used_bytes == 0
    assert 'code="500"' not in shared.call("GET", "/metrics").body.decode()


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none needed", max_retries=0) as client:
        yield client


def post(server: Running, body: Any, path: str = "/v1/chat/completions") -> Any:
    return server.call("POST", path, body)


# The tests below use OpenAI's client.


def test_a_chat(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    asked = [*CAT, {"role": "assistant", "content": NOTED}, {"role": "user", "content": "What is my cat called?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    for n_cached in (0, len(prompt) - 1):
        reply = client.chat.completions.create(model=MODEL, messages=asked, temperature=0)  # type: ignore[arg-type]
        assert (reply.object, reply.model) == ("chat.completion", MODEL)
        (choice,) = reply.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == (
            "assistant",
            "Your cat is called Zoe.",
            "stop",
        )
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens == len(prompt)
        assert reply.usage.completion_tokens == len(tokenizer.encode("Your cat is called Zoe.")) + 1
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
        assert reply.usage.prompt_tokens_details.cached_tokens == n_cached


def test_a_reply_can_be_given_back_as_a_message(client: openai.OpenAI) -> None:
    """The message is as the client has it, with all the fields that mean nothing."""
    first = client.chat.completions.create(model=MODEL, messages=CAT, temperature=0).choices[0].message  # type: ignore[arg-type]
    asked = [
        *CAT,
        first,
        {"role": "user", "content": [{"type": "text", "text": "What is my "}, {"type": "text", "text": "cat called?"}]},
    ]
    reply = client.chat.completions.create(model=MODEL, messages=asked, temperature=0)  # type: ignore[arg-type]
    assert reply.choices[0].message.content == "Your cat is called Zoe."
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == first_turn_tokens(reply.usage.prompt_tokens, client)


def first_turn_tokens(n_prompt: int, client: openai.OpenAI) -> int:
    """Return how many tokens of the second prompt come before its own turn.

    The token that ended the first reply is left out, because it was chosen but not fed.
    """
    alone = [{"role": "user", "content": "What is my cat called?"}]
    usage = client.chat.completions.create(model=MODEL, messages=alone, max_tokens=1).usage  # type: ignore[arg-type]
    assert usage is not None
    return n_prompt - (usage.prompt_tokens - 1) - 1


def test_a_stream_says_what_the_whole_reply_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CAT, temperature=0)  # type: ignore[arg-type]
    stream = client.chat.completions.create(
        model=MODEL, messages=CAT, temperature=0, stream=True,
        stream_options={"include_usage": True}  # type: ignore[arg-type]
    )  # fmt: skip
    *chunks, last = list(stream)
    assert {chunk.id for chunk in chunks} == {last.id} and {chunk.object for chunk in chunks} == {
        "chat.completion.chunk"
    }
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content == NOTED
    )
    assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) > 1
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_many_at_once_are_told_their_own(server: Running) -> None:
    async def ask(client: openai.AsyncOpenAI, i: int) -> tuple[str, str]:
        *told, last = make_dialogue(random.Random(i), 4)
        asked = [*messages(told), {"role": "user", "content": last.user}]
        if i % 2:
            reply = await client.chat.completions.create(model=MODEL, messages=asked, temperature=0)  # type: ignore[arg-type]
            return last.reply, reply.choices[0].message.content or ""
        text = ""
        stream = await client.chat.completions.create(model=MODEL, messages=asked, temperature=0, stream=True)  # type: ignore[arg-type]
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return last.reply, text

    async def ask_all() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none needed", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(32)))

    pairs = asyncio.run(ask_all())
    assert len({right for right, _ in pairs}) > 16
    assert [answer for _, answer in pairs] == [right for right, _ in pairs]


def cached(server: Running, prompt: str, key: str | None = None, **options: Any) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **options}
    answer = server.call("POST", "/v1/completions", asked, headers)
    assert answer.status == 200
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


SECRET = "My cat is called Zoe. My dog is called Rex."


def test_guesses_of_what_others_have_asked_look_all_the_same(server: Running) -> None:
    """A right guess finds as little as a wrong one.

    A client that asks again with the same salt finds its prefix.
    """
    mine = {"cache_salt": "mine"}
    assert cached(server, SECRET, **mine) == 0
    for other in ({}, {"cache_salt": "other"}, {"prompt_cache_key": "mine"}, {"key": "mine", "user": "mine"}):
        assert cached(server, SECRET, **other) == 0
        server.forget()
        cached(server, SECRET, **mine)
    assert cached(server, SECRET, **mine, user="somebody", prompt_cache_key="a", key="b") > 5


def test_hints_are_no_walls_unless_they_are_made_walls(
    server: Running, embedded: LanguageModel, tokenizer: Tokenizer
) -> None:
    hints: list[dict[str, Any]] = [{}, {"key": "a"}, {"prompt_cache_key": "a"}, {"user": "a"}]
    assert [cached(server, SECRET, **hint) > 5 for hint in hints] == [False, True, True, True]
    with running(embedded, tokenizer, ServerOptions(isolate=True)) as isolated:
        assert [cached(isolated, SECRET, **hint) for hint in hints] == [0] * 4
        assert all(cached(isolated, SECRET, **hint) > 5 for hint in hints)


def test_each_key_has_its_own_prefixes(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    """The key may come in any of the headers."""
    keys = (Key("a", "a"), Key("b", "b"))
    with running(embedded, tokenizer, ServerOptions(keys=keys)) as server:
        assert [cached(server, SECRET, key) for key in "ab"] == [0, 0]
        headers = {"x-api-key": "a"}
        asked = {"model": MODEL, "prompt": SECRET, "max_tokens": 1}
        answer = server.call("POST", "/v1/completions", asked, headers)
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 5


def test_choices_are_drawn_from_seeds_of_their_own(client: openai.OpenAI) -> None:
    def draw(**options: Any) -> list[str]:
        reply = client.completions.create(model=MODEL, prompt="My", temperature=1.5, max_tokens=8, **options)
        assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
        return [choice.text for choice in reply.choices]

    three = draw(n=3, seed=7)
    assert three == draw(n=3, seed=7) == [text for i in range(3) for text in draw(seed=7 + i)]
    assert len(set(three)) == 3 and draw(n=3) != draw(n=3)
    assert draw(n=2, seed=7, extra_body={"top_k": 1}) == draw(n=2, seed=9, extra_body={"top_k": 1})


def test_choices_share_their_prompt(server: Running) -> None:
    n_computed = server.metric("computed_tokens_total")
    text = "My lucky number is 23. " * 20
    usage = server.chat(text, n=4, max_tokens=1).json["usage"]
    assert usage["completion_tokens"] == 4 and usage["prompt_tokens"] > 100
    n_reused = usage["prompt_tokens_details"]["cached_tokens"]
    assert server.metric("computed_tokens_total") - n_computed == usage["prompt_tokens"] - n_reused
    events = server.chat(text, n=3, max_tokens=2, stream=True, seed=1, temperature=1).events[:-1]
    ends = [choice for event in events for choice in json.loads(event)["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1, 2]
    assert server.metric("computed_tokens_total") - n_computed == usage["prompt_tokens"] - n_reused + 1 + 3


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_reply_ends_where_it_is_told_to(client: openai.OpenAI, is_stream: bool) -> None:
    def ask(**options: Any) -> tuple[str, str]:
        found = client.chat.completions.create(model=MODEL, messages=CAT, temperature=0, stream=is_stream, **options)  # type: ignore[call-overload]
        if not is_stream:
            return found.choices[0].message.content, found.choices[0].finish_reason
        chunks = list(found)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0].finish_reason

    assert ask() == (NOTED, "stop")
    assert ask(stop="not") == ("Okay, ", "stop")
    assert ask(stop=["zzz", ",", "noted"]) == ("Okay", "stop")
    for name in ("max_tokens", "max_completion_tokens"):
        text, reason = ask(**{name: 2})
        assert NOTED.startswith(text) and text != NOTED and reason == "length"


def test_completions_of_texts_and_tokens(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    def texts(prompt: Any, **options: Any) -> list[str]:
        reply = client.completions.create(model=MODEL, prompt=prompt, temperature=0, **options)
        assert reply.object == "text_completion" and [choice.index for choice in reply.choices] == list(
            range(len(reply.choices))
        )
        return [choice.text for choice in reply.choices]

    cat, dog = (
        f"<|bos|><|user|>{text}<|end|><|assistant|>" for text in ("My cat is called Zoe.", "What is my dog called?")
    )
    assert texts(cat) == [NOTED] and texts([cat, dog]) == [NOTED, UNKNOWN]
    ids = [tokenizer.encode(text) for text in (cat, dog)]
    assert (
        texts(ids[0]) == [NOTED]
        and texts(ids) == [NOTED, UNKNOWN]
        and texts([ids[0], dog], n=2) == [NOTED] * 2 + [UNKNOWN] * 2
    )
    assert texts(cat, echo=True) == [cat + NOTED]
    plain = "My cat is called Zoe."
    assert texts(tokenizer.encode(plain), echo=True, max_tokens=0) == [plain] == texts(plain, echo=True, max_tokens=0)
    pieces: dict[int, str] = {}
    for chunk in client.completions.create(model=MODEL, prompt=[cat, dog], temperature=0, stream=True, echo=True):
        (choice,) = chunk.choices
        pieces[choice.index] = pieces.get(choice.index, "") + choice.text
    assert pieces == {0: cat + NOTED, 1: dog + UNKNOWN}


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL] == [client.models.retrieve(MODEL).id]
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.models.retrieve("gpt")


def test_the_clients_errors_are_those_it_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model=MODEL, messages=CAT, temperature=3)  # type: ignore[arg-type]
    assert (found.value.param, found.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=CAT)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"


# The tests below are about what is refused, and in which words.


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [*CAT, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "a", "mood": "bad"}]}, "messages[0].mood"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 0.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"user": 5}, "user"),
        ({"temprature": 1}, "temprature"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"mirostat": 2}, "mirostat"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"left_out": ["a"]}, "left_out"),
        ({"namespaces": {"a": "b"}}, "namespaces"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_a_wrong_parameter_is_named(server: Running, change: dict[str, Any], param: str) -> None:
    answer = post(server, BASE | change)
    assert (answer.status, answer.error["param"], answer.error["type"]) == (400, param, "invalid_request_error")
    assert param in answer.error["message"] or "template" in answer.error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": ["a"] * 5, "n": 4}, "prompt"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": "yes"}, "echo"),
        ({"messages": CAT}, "messages"),
    ],
)
def test_a_wrong_parameter_of_a_completion_is_named(server: Running, change: dict[str, Any], param: str) -> None:
    answer = post(server, {"model": MODEL, "prompt": "a"} | change, "/v1/completions")
    assert (answer.status, answer.error["param"]) == (400, param)


def test_what_changes_nothing_is_accepted(server: Running) -> None:
    no_tools = {
        "tools": [],
        "tool_choice": "none",
        "logprobs": False,
        "response_format": {"type": "text"},
        "store": False,
    }
    no_bias = {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0}
    harmless = no_tools | no_bias | {"user": "me", "n": 1, "stop": None, "seed": None, "max_tokens": None}
    harmless |= {"top_k": -1, "mirostat": 0, "mirostat_tau": 5, "cache_prompt": True, "skip_special_tokens": True}
    assert post(server, BASE | harmless | {"temperature": 0}).json["choices"][0]["message"]["content"] == NOTED


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b'{"model": NaN}', b'"\\ud800"', b"\xff\xfe", b"[" * 100_0, b"1" * 5000, b"[]", b"null",
        b"5",
        b'{"model": "embedded", "messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_a_bad_request(server: Running, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        answer = post(server, body, path)
        assert (answer.status, answer.error["code"]) == (400, "invalid_json")


def test_too_many_tokens(server: Running) -> None:
    long = "cat " * LIMIT
    for answer in (
        server.chat(long),
        post(server, {"model": MODEL, "prompt": long}, "/v1/completions"),
        post(server, {"model": MODEL, "prompt": "cat", "max_tokens": LIMIT}, "/v1/completions"),
    ):
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert str(LIMIT) in answer.error["message"]


def test_paths_and_methods(server: Running) -> None:
    for method, path in (
        ("POST", "/v1/images"),
        ("GET", "/v1/models/"),
        ("GET", "/docs"),
        ("GET", "/v1/models/a/b"),
    ):
        answer = server.call(method, path, b"{}" if method == "POST" else None)
        assert answer.status == 404 and answer.error["type"] == "invalid_request_error"
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/models", "GET HEAD"),
        ("POST", "/health", "GET HEAD"),
    ):
        answer = server.call(method, path)
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert sorted(answer.headers["Allow"].split(", ")) == allowed.split()
    for path in ("/health", "/metrics", "/v1/models", "/"):
        assert (server.call("HEAD", path).status, server.call("HEAD", path).body) == (200, b"")


@pytest.mark.parametrize("n_bytes", [(1 << 16) + 1, 1 << 18, 1 << 23])
@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_that_is_too_large(
    server: Running, n_bytes: int, is_declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server also refuses a body whose length nobody says.

    A client that goes on sending after the refusal may find the connection closed.
    """
    monkeypatch.setattr(guard, "_DRAIN_SECONDS", PATIENCE_SECONDS)  # This client and the server share a processor.
    body = b'{"model": "' + b"a" * (n_bytes - 13) + b'"}'
    try:
        answer = post(server, body if is_declared else (body[i : i + 5000] for i in range(0, n_bytes, 5000)))
    except (BrokenPipeError, ConnectionResetError):
        assert n_bytes == 1 << 23
        return
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


# The tests below are about clients that come and go.


def test_keys(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    with running(embedded, tokenizer, ServerOptions(api_key="sésame")) as server:
        server.headers = {}
        assert server.call("GET", "/health").json == {"status": "ok"}
        key = "sésame".encode().decode("latin-1")
        for header in (
            None,
            "",
            "Bearer",
            "Bearer ",
            "Bearer wrong",
            f"Basic {key}",
            key,
            f"Bearer {key}x",
            "Bearer \x80",
        ):
            for method, path in (
                ("GET", "/v1/models"),
                ("GET", "/metrics"),
                ("POST", "/v1/chat/completions"),
                ("GET", "/nowhere"),
            ):
                answer = server.call(method, path, headers={} if header is None else {"Authorization": header})
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), header
                assert answer.error["type"] == "authentication_error" and "sésame" not in answer.error["message"]
        server.headers = {"Authorization": f"Bearer {key}"}
        assert server.chat().json["choices"][0]["message"]["content"] == NOTED
        assert server.call("GET", "/metrics", headers={"Authorization": f"bearer {key}"}).status == 200


@pytest.fixture
def gated(embedded: LanguageModel) -> Iterator[Gated]:
    model = Gated(embedded)
    yield model
    model.open()


def send(server: Running, body: dict[str, Any]) -> http.client.HTTPConnection:
    """Send a request, and leave its answer unread."""
    connection = server.connect()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(BASE | {"temperature": 0} | body), JSON | server.headers
    )
    return connection


def test_too_many_requests(gated: Gated, tokenizer: Tokenizer) -> None:
    with running(gated, tokenizer, ServerOptions(max_requests=2)) as server:
        gated.is_open = False
        first = [send(server, {"stream": i == 1}) for i in range(2)]
        wait_until(lambda: server.engine.load.total == 2)
        answer = server.chat()
        assert (answer.status, answer.headers["Retry-After"], answer.error["type"]) == (429, "1", "rate_limit_error")
        assert server.call("GET", "/health").status == server.call("GET", "/v1/models").status == 200
        gated.open()
        for connection in first:
            assert connection.getresponse().status == 200
            connection.close()
        wait_until(lambda: server.chat().status == 200)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n_steps", [0, 3])
def test_who_goes_frees_its_bytes(gated: Gated, tokenizer: Tokenizer, is_stream: bool, n_steps: int) -> None:
    """The client goes before the first token, or later. Its generation ends."""
    with running(gated, tokenizer) as server:
        gated.is_open = False
        connection = send(
            server, {"stream": is_stream, "messages": [{"role": "user", "content": "What is my dog called?"}], "n": 2}
        )
        wait_until(lambda: gated.n_begun == 1)
        for n in range(n_steps):
            gated.may_step.release()
            wait_until(lambda n=n: gated.n_begun == n + 2)  # type: ignore[misc]
        if n_steps and is_stream:
            assert connection.getresponse().readline().startswith(b"data: ")
        n_generated = server.engine.stats.n_generated
        connection.close()
        wait_until(lambda: all(job.is_cancelled for job in list(scheduler_of(server.engine).jobs.values())))
        gated.open()
        server.settle()
        assert server.engine.stats.n_generated <= n_generated + 2 and not server.engine.stats.finished["stop"]
        wait_until(lambda: server.metric('requests_total{code="499",path="/v1/chat/completions"}') == 1)


def test_who_goes_while_it_sends(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    with running(embedded, tokenizer, ServerOptions(max_requests=1)) as server:
        connection = server.connect()
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        assert server.chat().status == 200  # A half-sent request takes no place.
        connection.close()
        assert server.chat().status == 200


def test_who_sends_too_slowly(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    with running(embedded, tokenizer, ServerOptions(body_seconds=0.05)) as server:
        connection = server.connect()
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408
        connection.close()


def test_who_does_not_listen_counts_as_gone(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    """The connection of such a client stays, but its place does not.

    Sockets buffer so much that they hide this for long, so there is no socket here.
    """
    memory = HybridMemory(embedded.memory_spec, "16MiB", poison=True)
    app = make_app(Engine(embedded, memory, tokenizer), tokenizer, MODEL, ServerOptions(stall_seconds=0.05))
    body = json.dumps(BASE | {"stream": True}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": RAW_JSON,
        "query_string": b"",
        "asgi": {},
    }

    async def receive() -> dict[str, Any]:
        return incoming.pop() if incoming else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def use() -> None:
        async with app.state.service.lifespan(app):
            await asyncio.wait_for(app(scope, receive, send), PATIENCE_SECONDS)
            while not app.state.service.engine.is_idle:
                await asyncio.sleep(0.001)

    incoming = [{"type": "http.request", "body": body}]
    asyncio.run(use())
    memory.check()
    assert memory.usage().used_bytes == 0


def test_what_it_knows_is_saved_again_and_again_and_at_the_end(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    saved = list[bool]()

    def save() -> None:
        saved.append(service.is_open)
        if len(saved) == 2:
            raise OSError("the disk is full")

    engine = Engine(embedded, HybridMemory(embedded.memory_spec, "16MiB"), tokenizer)
    service = make_app(engine, tokenizer, MODEL, ServerOptions(save=save, save_seconds=0.01)).state.service

    async def use() -> None:
        async with service.lifespan(None):
            while len(saved) < 4:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(use(), PATIENCE_SECONDS))
    assert saved[:4] == [True] * 4 and not saved[-1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_server_that_does_not_run_says_so(embedded: LanguageModel, tokenizer: Tokenizer, when: str) -> None:
    app = make_app(Engine(embedded, HybridMemory(embedded.memory_spec, "16MiB"), tokenizer), tokenizer, MODEL)
    statuses: list[int] = []

    async def ask(method: str, path: str) -> None:
        scope = {"type": "http", "method": method, "path": path, "headers": RAW_JSON, "query_string": b"", "asgi": {}}
        incoming = [{"type": "http.request", "body": b"{}"}]

        async def receive() -> dict[str, Any]:
            return incoming.pop() if incoming else {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await app(scope, receive, send)

    async def use() -> None:
        if when == "after":
            async with app.state.service.lifespan(app):
                await ask("POST", "/v1/completions")
        await ask("POST", "/v1/completions")
        await ask("GET", "/v1/models")

    asyncio.run(use())
    assert statuses == ([400] if when == "after" else []) + [503, 200]


# The tests below are about what breaks.


def test_a_step_that_fails_ends_its_requests_and_no_others(
    gated: Gated, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with running(gated, tokenizer) as server:
        gated.error = RuntimeError("a secret of the house")
        answer = server.chat()
        assert (answer.status, answer.error["type"]) == (500, "server_error") and b"secret" not in answer.body
        gated.error = None
        assert server.chat().json["choices"][0]["message"]["content"] == NOTED
        gated.is_open = False
        connection = send(server, {"stream": True})
        wait_until(lambda: server.engine.load.running == 1)
        gated.may_step.release()
        response = connection.getresponse()
        assert response.status == 200 and response.readline().startswith(b"data: ")
        gated.error = RuntimeError("a secret of the house")
        gated.open()
        rest = response.read()
        assert b'"error":' in rest and b"secret" not in rest and b"[DONE]" not in rest
        gated.error = None
        connection.close()
        server.settle()
    assert "a secret of the house" in caplog.text


def test_a_memory_that_cannot_hold_it(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    """The server refuses by its length what could never fit.

    The memory refuses what does not fit now.
    """
    with running(embedded, tokenizer, budget="1MiB") as server:
        limit = server.service.context_tokens
        assert 64 < limit < 4096
        answer = server.chat("cat " * limit)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        n_before = server.chat().status == 200 and server.prefixes.stats().n_checkpoints
        # Nobody checks whether these are tokens of the model.
        answer = post(server, {"model": MODEL, "prompt": [10**9] * 50_000}, "/v1/completions")
        assert (answer.status, answer.error["code"]) == (
            400,
            "context_length_exceeded",
        ) and "50000 tokens" in answer.error["message"]
        assert server.prefixes.stats().n_checkpoints == n_before > 0
        n_tokens = limit * 3 // 4
        with server.engine.lock:
            held = server.memory.open()
            server.memory.run(embedded, {held: [1] * n_tokens}, max_tokens=16)
        for is_stream in (False, True):
            asked = {"model": MODEL, "prompt": [1] * n_tokens, "max_tokens": 1, "stream": is_stream}
            answer = post(server, asked, "/v1/completions")
            assert (answer.status, answer.error["code"], answer.headers["Retry-After"]) == (503, "out_of_memory", "1")
        with server.engine.lock:
            server.memory.close(held)
        assert server.chat().status == 200


def test_what_runs_may_end_in_the_grace_period(gated: Gated, tokenizer: Tokenizer) -> None:
    with running(gated, tokenizer, ServerOptions(grace_seconds=PATIENCE_SECONDS)) as server:
        gated.is_open = False
        connections = [send(server, {"stream": i == 1}) for i in range(2)]
        wait_until(lambda: server.engine.load.total == 2)
        server.server.should_exit = True
        wait_until(lambda: not server.service.is_open)
        gated.open()
        for connection in connections:
            body = connection.getresponse().read()
            assert b"noted" in body
            connection.close()


def test_what_does_not_end_in_the_grace_period_is_told(
    gated: Gated, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After the grace, connections are cut even if a client still waits for an answer. On a slow machine the awaited
    # step takes long, so the grace is longer here.
    monkeypatch.setattr(listening, "_EXTRA_GRACE_SECONDS", int(PATIENCE_SECONDS))
    with running(gated, tokenizer, ServerOptions(grace_seconds=0)) as server:
        gated.is_open = False
        connections = [send(server, {"stream": i == 1}) for i in range(2)]
        wait_until(lambda: server.engine.load.total == 2)
        server.server.should_exit = True
        wait_until(lambda: all(job.is_cancelled for job in list(scheduler_of(server.engine).jobs.values())))
        gated.open()
        for connection in connections:
            response = connection.getresponse()
            assert response.status == 503 and b"server_unavailable" in response.read()
            connection.close()


def test_metrics(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    with running(embedded, tokenizer) as server:
        usages = [server.chat().json["usage"] for _ in range(3)]
        server.chat(temperature=9)
        server.call("GET", "/nowhere")
        assert server.metric('requests_total{code="200",path="/v1/chat/completions"}') == 3
        assert server.metric('requests_total{code="400",path="/v1/chat/completions"}') == 1
        assert server.metric('requests_total{code="404",path="other"}') == 1
        assert server.metric("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
        assert (
            server.metric("reused_tokens_total")
            == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
            > 0
        )
        assert server.metric("generated_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
        assert server.metric("time_to_first_token_seconds_count") == 3
        assert server.metric("inter_token_seconds_count") == server.metric("generated_tokens_total") - 3
        assert [server.metric(f'generations{{state="{state}"}}') for state in ("running", "waiting", "swapped")] == [
            0,
            0,
            0,
        ]
        usage = server.memory.usage()
        assert {kind: server.metric(f'used_bytes{{kind="{kind}"}}') for kind in usage.by_kind} == usage.by_kind
        assert "process_resident_memory_bytes" in server.call("GET", "/metrics").body.decode()
        assert server.metric("free_bytes") + usage.used_bytes == server.metric("budget_bytes") == usage.budget_bytes
