"""A server operates in simulated time: clients that come, leave and dawdle ask the app behind its guard.

The promises hold whatever happens. Every client gets a whole answer or a whole error, or has left. What it gets is what
its generations said, and what they would say alone. Nobody waits for ever. When the server has stopped, nothing is left
behind.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random
from typing import Any

from torch import Tensor

from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine, Generation, Sampling
from hybridmem.chat.server import ServerOptions, make_app
from hybridmem.memory import HybridMemory, Step
from hybridmem.memory.prefix.cache import PrefixCache
from tests.chat.engines import choose_alone
from tests.operation.simulated_time import SimulatedLoop
from tests.operation.strangers import Strangers
from tests.speaker import speaker, tokenizer_of_speaker

N_CLIENTS = 30
_MODEL = "speaker"
_TEXTS = ("My cat is called Zoe.", "What is it called?", "Hello", "Tell me more about the memory of a cat.")


class ModelError(Exception):
    """The model raises this in the middle of a step."""


@dataclass
class Client:
    """Holds what one client asks, what it got, and the generations behind it.

    Attributes:
        leaves_after: seconds after which it is gone; None: it waits for its answer.
        dawdles: seconds that it takes for each piece of a stream.
    """

    path: str
    body: bytes
    streams: bool
    arrives: float
    leaves_after: float | None
    dawdles: float
    status: int = 0
    pieces: list[bytes] = field(default_factory=list)
    is_whole: bool = False
    has_left: bool = False
    generations: list[tuple[Generation, list[int], Any]] = field(default_factory=list)


_CLIENT: ContextVar[Client] = ContextVar("client")


class _Engine(Engine):
    """Notes which client a generation is of."""

    def submit_choices(self, token_ids: Any, samplings: Iterable[Sampling], **options: Any) -> list[Generation]:
        wanted = [*samplings]
        generations = super().submit_choices(token_ids, wanted, **options)
        for generation, sampling in zip(generations, wanted, strict=True):
            _CLIENT.get().generations.append((generation, list(token_ids), sampling))
        return generations


class ServingWorld:
    """Runs one seed to its end.

    Attributes:
        events: what happened, by name: a simulation in which nothing does proves nothing.
    """

    def __init__(self, seed: int, loop: SimulatedLoop) -> None:
        self.seed, self.events, self._random, self._loop = seed, Counter[str](), Random(seed), loop
        random, model = self._random, speaker()
        self.memory_spec, self.config = model.memory_spec, None
        self._n_failures = 0
        self.memory = HybridMemory(
            model.memory_spec, random.choice(["8KiB", "16KiB", "1MiB"]), rollback_window=random.choice([0, 5]),
            page_tokens=4, poison=True, host_budget=random.choice([1 << 12, None]),
        )  # fmt: skip
        self.cache = PrefixCache(self.memory)
        self.engine = _Engine(
            self, self.memory, tokenizer_of_speaker(), prefixes=self.cache, step_tokens=random.choice([24, 64]),  # type: ignore[arg-type]
            max_running=random.choice([2, 6]), clock=loop.time,
            speculation=Speculation(looks_up=random.random() < 0.5, adapts=False),
        )  # fmt: skip
        options = ServerOptions(
            max_requests=random.choice([3, 64]),
            max_tokens=96,
            stall_seconds=5.0,
            grace_seconds=random.choice([0.1, 60.0]),
        )
        self.app = make_app(self.engine, tokenizer_of_speaker(), _MODEL, options)
        self._clients = [self._draw() for _ in range(N_CLIENTS)]
        self._strangers = Strangers(self.memory, speaker(), random, 300, self.events)

    def __call__(self, step: Step) -> Tensor:
        """Run the model, which takes its time, or fail after all of its layers."""
        logits = speaker()(step)
        self._loop.pass_time(self._random.choice((0.01, 0.02, 0.3)))
        if self._n_failures:
            self._n_failures -= 1
            self.events["model failed"] += 1
            raise ModelError
        return logits

    def _draw(self) -> Client:
        random = self._random
        body: dict[str, Any] = {
            "model": random.choice((*[_MODEL] * 30, "unknown")),
            "max_tokens": random.randrange(1, 14),
        }
        body |= random.choice(({"temperature": 0}, {"temperature": 0.9, "seed": random.randrange(99)}))
        body |= random.choice(({}, {"n": 2}, {"stop": "e"}, {"user": "bob"}))
        streams = random.random() < 0.5
        if streams:
            body["stream"] = True
        path = random.choice(("/v1/chat/completions", "/v1/completions"))
        text = " ".join(random.choice(_TEXTS) for _ in range(random.randrange(1, 4)))
        if path == "/v1/completions":
            body["prompt"] = random.choice((text, [5, 6, 7, 8] * random.randrange(1, 9), [text, "Hello"]))
        else:
            body["messages"] = [{"role": "user", "content": text}]
        data = json.dumps(body).encode()
        if random.random() < 0.05:
            data = data[:-5]
        leaves = random.choice((None, None, None, None, 0.0, 0.2, 2.0))
        dawdles = random.choice((0.0, 0.0, 0.0, 0.5, 20.0))
        return Client(path, data, streams, random.random() * 6, leaves, dawdles)

    async def run(self) -> None:
        """Serve until all clients have gone. Raises AssertionError where a promise is broken."""
        async with self.app.router.lifespan_context(self.app):
            shocks = asyncio.create_task(self._shock())
            tasks = [asyncio.create_task(self._ask(client)) for client in self._clients]
            stops_early = self._random.random() < 0.3
            if stops_early:
                await asyncio.sleep(4.0)
                self.app.state.service.close()
            await asyncio.gather(*tasks)
            shocks.cancel()
            await asyncio.gather(shocks, return_exceptions=True)
        self._end(may_refuse=stops_early)

    async def _shock(self) -> None:
        """Break the model, take room and give it back, until no client is left."""
        random = self._random
        while True:
            await asyncio.sleep(random.random())
            if random.random() < 0.2:
                self._n_failures = random.randrange(1, 3)
            if random.random() < 0.4:
                self._strangers.take_room()
            else:
                self._strangers.give_room()

    async def _ask(self, client: Client) -> None:
        """Act as a client, as an ASGI server sees one."""
        _CLIENT.set(client)
        await asyncio.sleep(client.arrives)
        gone, messages = asyncio.Event(), [{"type": "http.request", "body": client.body, "more_body": False}]

        def leave() -> None:
            client.has_left = not client.is_whole
            gone.set()

        if client.leaves_after is not None:
            self._loop.call_later(client.leaves_after, leave)

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if gone.is_set():
                return
            if message["type"] == "http.response.start":
                client.status = message["status"]
                return
            client.pieces.append(message.get("body", b""))
            client.is_whole = not message.get("more_body", False)
            if client.streams and client.dawdles:
                await asyncio.sleep(client.dawdles)

        scope = {
            "type": "http", "method": "POST", "path": client.path, "raw_path": client.path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "scheme": "http",
            "http_version": "1.1", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "",
        }  # fmt: skip
        await self.app(scope, receive, send)

    # The methods below check what must hold.

    def _end(self, *, may_refuse: bool) -> None:
        for client in self._clients:
            self._check(client, may_refuse=may_refuse)
        self._strangers.give_room()
        assert self.engine.is_idle, f"seed {self.seed}: {self.engine.load} go on"
        self.events["preempted"] += self.engine.stats.n_preempted
        self.events["reused"] += self.engine.stats.n_reused
        self.cache.clear()
        self.memory.check()
        usage = self.memory.usage()
        assert usage.used_bytes + usage.host_bytes + usage.disk_bytes == 0, f"seed {self.seed}: {usage}"
        self.memory.close_all()

    def _check(self, client: Client, *, may_refuse: bool) -> None:
        where = f"seed {self.seed}, {client}"
        for generation, prompt, sampling in client.generations:
            assert generation.is_finished, where
            said = generation.token_ids
            assert said == choose_alone(speaker(), prompt, said, sampling), where
        was_dropped = client.has_left or (client.streams and client.dawdles > 5 and not client.is_whole)
        if was_dropped:
            self.events["left"] += 1
            return
        assert client.is_whole, where
        self.events[str(client.status)] += 1
        content = b"".join(client.pieces)
        if client.status != 200:
            assert client.status in {400, 404, 429, 500, 503}, where
            assert json.loads(content)["error"].keys() == {"message", "type", "param", "code"}, where
            return
        choices, ended_by = _read(content, streams=client.streams)
        if ended_by is not None:
            assert ended_by in ("server_error",), where
            self.events["stream ended by an error"] += 1
            return
        assert all(g.finish_reason in ("stop", "length") for g, _, _ in client.generations), where
        assert sorted(choices.values()) == sorted(g.text for g, _, _ in client.generations), where


def _read(content: bytes, *, streams: bool) -> tuple[dict[int, str], str | None]:
    """Return the text of each choice, and the type of the error that ended a stream."""
    if not streams:
        return {c["index"]: _text(c) for c in json.loads(content)["choices"]}, None
    events = content.decode().split("\n\n")
    assert events.pop() == ""
    events = [event for event in events if not event.startswith(":")]  # Comments say that the prompt is computed.
    assert all(event.startswith("data: ") for event in events)
    *events, last = [event.removeprefix("data: ") for event in events]
    choices: dict[int, str] = {}
    for event in map(json.loads, events):
        for choice in event.get("choices", ()):
            choices[choice["index"]] = choices.get(choice["index"], "") + _text(choice)
    if last == "[DONE]":
        return choices, None
    return choices, str(json.loads(last)["error"]["type"])


def _text(choice: dict[str, Any]) -> str:
    said = choice.get("message", choice.get("delta"))
    return str(choice["text"] if said is None else said.get("content") or "")
