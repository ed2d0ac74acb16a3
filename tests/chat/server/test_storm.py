"""Many rude clients come at once. Nobody is told what another said, nothing is left behind, and no fault is ours.

The storm lasts five seconds; `STORM_SECONDS=60` makes it a minute.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer, encode_chat
from hybridmem.chat.server import ServerOptions, guard
from hybridmem.chat.simulation.dialogues import make_dialogue, messages
from hybridmem.memory import HybridMemory
from hybridmem.models import LanguageModel
from tests.chat.servers import MODEL, PATIENCE_SECONDS, Running, running
from tests.extent import only_in_long

SECONDS = float(os.environ.get("STORM_SECONDS", "5"))
N_CLIENTS = 32
LIMIT = 512


@dataclass(frozen=True)
class Question:
    """Holds a chat that ends in a question, and the right answer."""

    messages: list[dict[str, str]]
    answer: str


@dataclass
class Tally:
    """Counts what the clients have seen."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    n_answers: int = 0
    n_left: int = 0


def make_questions(model: LanguageModel, tokenizer: Tokenizer, n_clients: int, n_each: int) -> list[list[Question]]:
    """Make questions for each client. The model answers each of them rightly when it is alone."""
    drawn = []
    for i in range(n_clients * n_each):
        *told, last = make_dialogue(random.Random(f"storm/{i}"), 2 + i % 7)
        drawn.append(Question([*messages(told), {"role": "user", "content": last.user}], last.reply))
    engine = Engine(model, HybridMemory(model.memory_spec, "256MiB"), tokenizer)
    said = [engine.submit(encode_chat(tokenizer, question.messages), max_tokens=32) for question in drawn]
    engine.run()
    known = [
        [drawn[i] for i in range(c, len(drawn), n_clients) if said[i].text == drawn[i].answer] for c in range(n_clients)
    ]
    assert all(known), "the model should know nearly all of them"
    return known


async def exchange(port: int, path: str, body: bytes, *, leave_after: int | None = None) -> tuple[int, bytes]:
    """Send a request in HTTP/1.0, whose answer ends with its connection.

    A client that leaves does so after that many lines, and gets status 0.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        if leave_after is not None:
            for _ in range(leave_after):
                await reader.readline()
            return 0, b""
        answer = await reader.read()
        start, _, rest = answer.partition(b"\r\n\r\n")
        return int(start.split()[1]), rest
    finally:
        writer.close()


def text_of(answer: bytes, *, is_stream: bool) -> str:
    if not is_stream:
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    *events, done, empty = answer.decode().split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    # Events that begin with a colon are comments, which say that the server is still there.
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]
    assert all("error" not in chunk for chunk in chunks), chunks[-1]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


RUDE: dict[str, tuple[str, bytes, int]] = {
    "malformed": ("/v1/chat/completions", b'{"model": "embedded", "messages": [', 400),
    "wrong type": ("/v1/chat/completions", b'{"model": "embedded", "messages": "hello"}', 400),
    "wrong value": ("/v1/completions", b'{"model": "embedded", "prompt": [99999999]}', 400),
    "too long": ("/v1/completions", json.dumps({"model": MODEL, "prompt": "cat " * 600}).encode(), 400),
    "too large": ("/v1/completions", b" " * (1 << 17), 413),
    "unknown model": ("/v1/completions", b'{"model": "gpt", "prompt": "hello"}', 404),
    "unknown path": ("/v1/nothing", b"{}", 404),
}


async def client(port: int, number: int, questions: list[Question], tally: Tally, end: float) -> None:
    """Ask and leave, and be rude in between, until the time is over.

    Even in a short time, it is rude once in each way.
    """
    rng = random.Random(number)
    first = ["leave", "ask", sorted(RUDE)[number % len(RUDE)], "draw"]
    while first or time.monotonic() < end:
        kind = first.pop() if first else rng.choices(["ask", "leave", "draw", *RUDE], [12, 8, 2, *[1] * len(RUDE)])[0]
        question = rng.choice(questions)
        is_stream = rng.random() < 0.8
        asked = {"model": MODEL, "messages": question.messages, "temperature": 0, "max_tokens": 32, "stream": is_stream}
        if kind == "ask":
            status, answer = await exchange(port, "/v1/chat/completions", json.dumps(asked).encode())
            tally.n_answers += 1
            if (said := text_of(answer, is_stream=is_stream)) != question.answer:
                tally.wrong.append((question.answer, said))
        elif kind == "leave":
            n_lines = rng.choice([0, 0, 1, 8, 10, 14])
            if n_lines == 0:
                asked |= {"n": rng.choice([1, 3])}
            status, _ = await exchange(port, "/v1/chat/completions", json.dumps(asked).encode(), leave_after=n_lines)
            tally.n_left += 1
            await asyncio.sleep(rng.random() * 0.02)
        elif kind == "draw":
            asked |= {"temperature": 1.5, "n": 2, "stream": False}
            status, _ = await exchange(port, "/v1/chat/completions", json.dumps(asked).encode())
        else:
            path, body, _ = RUDE[kind]
            status, _ = await exchange(port, path, body)
        tally.statuses[kind, status] += 1


@only_in_long
def test_a_storm(embedded: LanguageModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is too small for all clients at once. Some are swapped out, and cached prefixes come and go."""
    # A busy machine may take longer to read a body that is refused. A client that is cut off meanwhile gets no answer.
    monkeypatch.setattr(guard, "_DRAIN_SECONDS", PATIENCE_SECONDS)
    questions = make_questions(embedded, tokenizer, N_CLIENTS, 6)
    options = ServerOptions(max_tokens=LIMIT, max_body_bytes=1 << 16, max_requests=2 * N_CLIENTS)
    with running(embedded, tokenizer, options, budget="6MiB", max_running=16) as server:
        tally = Tally()

        async def storm() -> None:
            end = time.monotonic() + SECONDS
            clients = [client(server.port, i, questions[i], tally, end) for i in range(N_CLIENTS)]
            await asyncio.wait_for(asyncio.gather(*clients), SECONDS + 5 * PATIENCE_SECONDS)

        asyncio.run(storm())
        server.settle()
        stats = server.engine.stats
        logging.info(
            "%s; %s answers, %s left; %s; %s",
            dict(tally.statuses),
            tally.n_answers,
            tally.n_left,
            stats,
            server.prefixes.stats(),
        )
        assert tally.wrong == []
        expected = {kind: status for kind, (_, _, status) in RUDE.items()} | {"ask": 200, "draw": 200, "leave": 0}
        assert set(tally.statuses) == set(expected.items())
        assert tally.n_answers >= N_CLIENTS and tally.n_left >= N_CLIENTS
        assert stats.finished["cancelled"] > 0 and stats.finished["error"] == 0 and stats.n_preempted > 0
        assert server.chat().status == 200


# The tests below send requests that nobody would think of.

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([MODEL, "user", "system", "text"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)
PARAMETERS = (
    "model messages prompt max_tokens max_completion_tokens temperature top_p top_k repetition_penalty seed stop "
    "stream stream_options n user echo best_of logprobs tools response_format logit_bias frequency_penalty suffix "
    "modalities nonsense"
).split()
LIKELY = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(-1, 4),
        "temperature": st.floats(-0.5, 2.5),
        "top_p": st.floats(0, 1),
        "top_k": st.integers(0, 9),
        "repetition_penalty": st.floats(0, 11),
        "seed": st.integers(),
        "n": st.integers(0, 3),
        "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=5),
        "stream": st.booleans(),
        "echo": st.booleans(),
        "prompt": st.text(max_size=9)
        | st.lists(st.text(max_size=4) | st.integers(-1, 940), max_size=3)
        | st.just([[5, 6], [7]]),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=9)}), max_size=3
        ),
    },
)
CORRECT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "My cat is called Zoe."}]},
    "/v1/completions": {"model": MODEL, "prompt": "My cat"},
}


@pytest.fixture(scope="module")
def patient(embedded: LanguageModel, tokenizer: Tokenizer) -> Iterator[Running]:
    with running(embedded, tokenizer, ServerOptions(max_tokens=LIMIT, default_tokens=4), budget="8MiB") as server:
        yield server


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from(sorted(CORRECT)),
    likely=LIKELY,
    strange=st.dictionaries(st.sampled_from(PARAMETERS), ANYTHING, max_size=2),
)
def test_no_request_is_too_strange(
    patient: Running, path: str, likely: dict[str, Any], strange: dict[str, Any]
) -> None:
    """The server answers whatever comes, or refuses it by the right name."""
    answer = patient.call("POST", path, json.dumps(CORRECT[path] | likely | strange).encode())
    if answer.status != 200:
        assert answer.status in (400, 404), answer.body
        param = answer.error["param"]
        assert param is None or param.partition("[")[0].partition(".")[0] in (
            *likely,
            *strange,
            "messages",
            "prompt",
            "model",
        )
    elif answer.headers["Content-Type"].startswith("text/event-stream"):
        assert answer.events[-1] == "[DONE]" and all("error" not in json.loads(event) for event in answer.events[:-1])
    patient.settle()


@given(path=st.sampled_from(sorted(CORRECT)), body=st.binary(max_size=64), cut=st.integers(0, 60))
def test_no_bytes_are_too_strange(patient: Running, path: str, body: bytes, cut: int) -> None:
    """The bytes are noise, alone or after something that began well."""
    for sent in (body, json.dumps(CORRECT[path]).encode()[:cut] + b"\0" + body):
        answer = patient.call("POST", path, sent)
        assert answer.status in (400, 404) and answer.error["type"] == "invalid_request_error"
