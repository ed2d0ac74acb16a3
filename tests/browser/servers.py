"""Makes servers for the browser, on ports of the test's choice. Their models are slow, or say what a test wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.server import ServerOptions, bind, make_app
from hybridmem.chat.server.listening import Server, url_of
from hybridmem.chat.server.memory_view.events import MemoryView
from hybridmem.memory import HybridMemory, Step
from hybridmem.memory.prefix import PrefixCache

PATIENCE_SECONDS = 120.0
MODEL = "embedded"
LONGEST_REPLY = 2000
"""A reply that does not end by itself may have so many tokens: a slow browser has time to stop it."""


class Slowed:
    """Is a model that takes its time, and that never ends a reply if `talks` is set.

    Attributes:
        pause_seconds: before each step.
        talks: no reply ends by itself.
    """

    def __init__(self, model: Any, stop_ids: tuple[int, ...] = ()) -> None:
        self.model, self.memory_spec, self.config = model, model.memory_spec, copy(model.config)
        self.config.max_position_embeddings = 1 << 20
        self.stop_ids = list(stop_ids)
        self.pause_seconds = 0.0
        self.talks = False
        self.error: Exception | None = None

    def __call__(self, step: Step) -> Tensor:
        time.sleep(self.pause_seconds)
        if self.error is not None:
            raise self.error
        logits = self.model(step)
        if self.talks:
            logits[:, self.stop_ids] = -1e9
        return logits


@dataclass
class Served:
    """Holds a server that runs, and what is behind it."""

    url: str
    model: Slowed
    engine: Engine
    view: MemoryView
    server: Server

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def serving(
    model: Slowed, tokenizer: Tokenizer, options: ServerOptions | None = None, *, port: int = 0, budget: str = "16MiB",
    host_budget: str | None = None,
) -> Iterator[Served]:  # fmt: skip
    """Run a server in a thread, and stop it in the end."""
    memory = HybridMemory(model.memory_spec, budget, rollback_window=32, host_budget=host_budget)
    engine = Engine(model, memory, tokenizer, prefixes=PrefixCache(memory), step_tokens=256)  # type: ignore[arg-type]
    # The default sampling has nothing that makes long replies end.
    options = replace(options or ServerOptions(), sampling=Sampling())
    app = make_app(engine, tokenizer, MODEL, options)
    with bind("127.0.0.1", port, has_key=False) as listener:
        server = Server(app)
        thread = threading.Thread(target=server.run, args=([listener],), name="server")
        thread.start()
        try:
            end = time.monotonic() + PATIENCE_SECONDS
            while not app.state.service.is_open:
                assert time.monotonic() < end, "the server did not start"
                time.sleep(0.005)
            yield Served(url_of(listener), model, engine, app.state.service.memory_view, server)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def folder_for(sessions: Path) -> ServerOptions:
    """Return options of a server that keeps its sessions in a folder."""
    return ServerOptions(sessions=str(sessions), grace_seconds=0.2, default_tokens=64)
