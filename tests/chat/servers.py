"""Holds what the tests of the server share: a real server on a free port, models that wait or break, and a client."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions, Service, bind, make_app
from hybridmem.chat.server.listening import Server, url_of
from hybridmem.chat.stored import SessionStore
from hybridmem.memory import HybridMemory, Step
from hybridmem.memory.prefix.cache import PrefixCache

MODEL = "embedded"
PATIENCE_SECONDS = 120.0
"""A test gives up after waiting so long for what must happen: even a slow machine is faster."""


class Gated:
    """Wraps a model. Its steps wait until a test lets them run, and fail when they are told to.

    Attributes:
        n_begun: steps that have come to the gate: all that the ones before them brought is counted by then.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.memory_spec, self.config = model, model.memory_spec, model.config
        self.may_step = threading.Semaphore(0)
        self.is_open = True
        self.n_begun = 0
        self.error: Exception | None = None

    def __call__(self, step: Step) -> Tensor:
        self.n_begun += 1
        if not self.is_open:
            assert self.may_step.acquire(timeout=PATIENCE_SECONDS), "the test forgot the gate"
        if self.error is not None:
            raise self.error
        return self.model(step)

    def open(self) -> None:
        self.is_open = True
        self.may_step.release()


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Return what OpenAI's clients read of an error. The test fails if a part is missing."""
        (name, error), *rest = self.json.items()
        assert name == "error" and not rest and error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"] and "Traceback" not in error["message"]
        return error

    @property
    def events(self) -> list[str]:
        """Return the events of a stream, without frames and comments."""
        *lines, empty = self.body.decode().split("\n\n")
        lines = [line for line in lines if not line.startswith(":")]
        assert empty == "" and all(line.startswith("data: ") for line in lines)
        return [line.removeprefix("data: ") for line in lines]


@dataclass
class Running:
    """Holds a server that runs, and what is behind it."""

    service: Service
    engine: Engine
    prefixes: PrefixCache
    server: Server
    sessions: SessionStore
    url: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def memory(self) -> HybridMemory:
        return self.engine.memory

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """Send a request over a connection of its own. Anything but bytes and iterators of them is sent as JSON."""
        connection = self.connect()
        try:
            if isinstance(body, dict | list | str | int | float):
                body = json.dumps(body).encode()
            connection.request(
                method, path, body=body, headers={"Content-Type": "application/json", **self.headers, **(headers or {})}
            )
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def chat(self, text: str = "My cat is called Zoe.", **options: Any) -> Answer:
        message = {"role": "user", "content": text}
        return self.call(
            "POST", "/v1/chat/completions", {"model": MODEL, "messages": [message], "temperature": 0} | options
        )

    def choice(self, **options: Any) -> dict[str, Any]:
        """Return the only choice of a chat that was answered."""
        answer = self.chat(**options)
        assert answer.status == 200, answer.body
        return dict(answer.json["choices"][0])

    def metric(self, name: str) -> float:
        """Return one line of /metrics, or 0 if it is not there yet."""
        lines = self.call("GET", "/metrics").body.decode().splitlines()
        return next(
            (float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == f"hybrid_memory_{name}"),
            0.0,
        )

    def forget(self) -> None:
        """Empty the prefix cache."""
        with self.engine.lock:
            self.prefixes.clear()

    def settle(self) -> None:
        """Wait until everything has ended.

        Then there is no request and no generation, and the memory holds only what the prefix cache holds.
        """
        wait_until(lambda: self.engine.is_idle)
        with self.engine.lock:
            self.memory.check()
            usage = self.memory.usage()
            assert all(sequence.is_checkpoint for sequence in usage.by_sequence.values())
            assert len(usage.by_sequence) == self.prefixes.stats().n_checkpoints
            assert (usage.host_bytes, usage.disk_bytes) == (0, 0)


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_true():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


@contextmanager
def running(
    model: Any, tokenizer: Tokenizer, options: ServerOptions | None = None, *, budget: str = "64MiB",
    saved: Path | None = None, **engine: Any,
) -> Iterator[Running]:  # fmt: skip
    """Run a server in a thread, with the prefixes that were saved.

    In the end the server is told to stop, and then nothing may be left.
    """
    memory = HybridMemory(model.memory_spec, budget, poison=True)
    prefixes = PrefixCache(memory, grid_tokens=64)
    if saved is not None:
        prefixes.load(saved)
    app = make_app(Engine(model, memory, tokenizer, prefixes=prefixes, **engine), tokenizer, MODEL, options)
    service = app.state.service
    with bind("127.0.0.1", 0, has_key=False) as listener:
        server = Server(app)
        thread = threading.Thread(target=server.run, args=([listener],), name="server")
        thread.start()
        headers = {} if service.options.api_key is None else {"Authorization": f"Bearer {service.options.api_key}"}
        try:
            wait_until(lambda: service.is_open)
            sessions = app.state.sessions.store
            yield Running(service, service.engine, prefixes, server, sessions, url_of(listener), headers)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive() and service.engine.is_idle
    prefixes.clear()
    memory.check()
    assert memory.usage().used_bytes == 0 and memory.usage().by_sequence == {}
