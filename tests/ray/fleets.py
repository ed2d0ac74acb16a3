"""Makes fleets for tests: options, free ports, and clients."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
from openai import OpenAI

from hybridmem.chat.commands.fleet_options import FLEET
from hybridmem.chat.commands.serve_options import SERVE
from hybridmem.cluster.serving.fleet_options import FleetOptions

RESUMES = {"session", "prefix"}
PATIENCE_SECONDS = 240.0
"""A test gives up after waiting so long for what must happen."""


def fleet_options(**given: Any) -> FleetOptions:
    """Return the default options of a fleet, changed by those that are given."""
    return FleetOptions.of({row.name: row.default for row in SERVE + FLEET} | given)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def client_of(url: str, key: str = "a key") -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def get(url: str) -> str:
    """Return the body of a page."""
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
        return str(response.read().decode())


def health(url: str) -> dict[str, Any]:
    """Return what one of the replicas reports about itself."""
    return dict(json.loads(get(f"{url}/health")))


def say(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def replicas_of(url: str) -> list[str]:
    """Return the names of two replicas that answer."""
    found = set[str]()
    wait_for(lambda: found.add(health(url)["replica"]) or len(found) == 2)
    return sorted(found)


def ask(url: str, messages: list[dict[str, Any]], **headers: str) -> tuple[str, dict[str, Any], int]:
    """Return a greedy reply, its route, and the tokens that were not computed for it."""
    reply = client_of(url).chat.completions.create(
        model="embedded", messages=messages, temperature=0, extra_headers=headers
    )
    about = reply.usage.model_extra["hybrid_memory"]
    return reply.choices[0].message.content, about["route"], about["reused_tokens"]


def replica_processes() -> list[psutil.Process]:
    """Return the processes of this test run's replicas."""
    found = list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # The process has ended meanwhile.
            if "ServeReplica:hybrid-memory:replica" in " ".join(process.cmdline()):
                found.append(process)
    return found
