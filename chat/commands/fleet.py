"""Lists the options of a fleet of replicas, and hands the command over to the package `cluster`, which runs it.

`cluster` imports `chat`, never the other way, so it is looked for by its name, and only if replicas are wanted.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hybridmem.chat.commands.option_table import Chosen, Option

ROUTERS = ("resumable", "consistent-hash", "round-robin", "load")

FLEET: tuple[Option, ...] = (
    Option("replicas", "whole", 1, "engines, each with a memory of --budget, in processes of their own; more than 1 "
           "needs hybridmem[cluster]", least=1, most=4096),
    Option("max_replicas", "whole", None, "most of them, where load adds some; unless given, as many as --replicas",
           least=1, most=4096),
    Option("cpus", "number", 1.0, "processors of a replica: its threads", least=0.1),
    Option("gpus", "number", 0.0, "GPUs of a replica", least=0),
    Option("gateways", "whole", 1, "processes that tokenise and route requests", least=1, most=256),
    Option("router", "text", "resumable", "how a replica is chosen: resumable (session, deepest prefix that it can "
           "resume, load), consistent-hash (of x-session-id), round-robin, load", choices=ROUTERS),
    Option("imbalance", "number", 1.5, "a replica with more requests than this times the mean is passed over",
           least=1),
    Option("store", "text", None, "folder or URL that keeps the sequences of all replicas, so that sessions move"),
    Option("store_bytes", "bytes", "64GiB", "bytes in the store; the sequences that were not used for longest go"),
    Option("store_days", "number", 7.0, "days after which a sequence in the store goes if nothing used it",
           least=0.001),
    Option("store_tokens", "whole", 32, "tokens that a sequence must have to be stored: shorter ones are computed "
           "again", least=1),
    Option("lease", "number", 30.0, "seconds for which a replica may hold a session without renewing", least=1),
    Option("kv_events", "whole", None, "port of the first replica's KV events in vLLM's format; others take the next",
           least=1024, most=65000),
    Option("event_tokens", "whole", 512, "tokens of a block in KV events; 512 is the grid of prefix caches",
           least=1),
)  # fmt: skip
"""Options of `hybrid-memory serve` beside those of one server; the command itself reads them."""

_NEEDED = {"ray": "ray[serve]"}
_REMEDY = "pip install 'hybridmem[cluster]'"


def is_fleet(chosen: Chosen) -> bool:
    """True if the options ask for more than one process with one memory.

    Raises SpecError for an option of a fleet that would have no effect.
    """
    from hybridmem.memory import SpecError

    if chosen["replicas"] > 1 or (chosen["max_replicas"] or 1) > 1:
        return True
    for row in FLEET:
        if chosen[row.name] != row.default:
            raise SpecError(f"{row.flag}={chosen[row.name]!r} is of several replicas; give --replicas 2, or leave it")
    return False


def find_cluster(module: str) -> Any:
    """Return a module of the package `cluster`. Raises SpecError, naming what to install, if a package is missing."""
    from hybridmem.memory import SpecError

    if missing := [package for name, package in _NEEDED.items() if find_spec(name) is None]:
        raise SpecError(f"several replicas need {', '.join(missing)}; install it with: {_REMEDY}")
    return import_module(f"hybridmem.cluster.{module}")


def run_fleet(chosen: Chosen) -> None:
    """Serve from several replicas on a Ray of this machine, until a signal says to stop."""
    find_cluster("commands.serve").run_local(chosen)
