"""Makes fleets for tests: options, free ports, and clients."""

from __future__ import annotations

import socket
from typing import Any

from openai import OpenAI

from chat.commands.fleet import FLEET
from chat.commands.serve_options import SERVE
from cluster.serving.fleet_options import FleetOptions

RESUMES = {"session", "prefix"}


def fleet_options(**given: Any) -> FleetOptions:
    """Return the default options of a fleet, but for those that are given."""
    return FleetOptions({row.name: row.default for row in SERVE + FLEET} | given)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def client_of(url: str, key: str = "a key") -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def say(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
