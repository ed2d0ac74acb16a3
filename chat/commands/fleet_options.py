"""Lists the options of a fleet of replicas, and calls the package `cluster`, which runs the fleet.

`cluster` imports `chat`, never the other way. So this module imports `cluster` by its name when it runs, and only if
the user wants replicas.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hybridmem.chat.commands.option_table import Chosen, Option
from hybridmem.defaults import PREFIX_GRID_TOKENS

ROUTERS = ("resumable", "consistent-hash", "round-robin", "load")

FLEET: tuple[Option, ...] = (
    Option("replicas", "whole", 1,
           "Run this many engines, each in a process of its own with a memory of --budget. More than 1 needs "
           "hybridmem[cluster].", least=1, most=4096),
    Option("max_replicas", "whole", None,
           "Load may raise the number of replicas up to this one. By default, it stays at --replicas.",
           least=1, most=4096),
    Option("cpus", "number", 1.0, "Each replica gets this many processors, and as many threads.", least=0.1),
    Option("gpus", "number", 0.0, "Each replica gets this many GPUs.", least=0),
    Option("gateways", "whole", 1, "This many processes tokenise and route requests.", least=1, most=256),
    Option("router", "text", "resumable",
           "How a replica is chosen. resumable: by the session, the longest prefix that it can resume, and load. "
           "consistent-hash: by the header x-session-id. round-robin: in turn. load: by load.", choices=ROUTERS),
    Option("imbalance", "number", 1.5, "Pass over a replica that has more requests than this times the mean.", least=1),
    Option("store", "text", None,
           "Keep the sequences of all replicas in this folder or URL, so that sessions can move between "
           "replicas."),
    Option("store_bytes", "bytes", "64GiB",
           "The store may take this many bytes. Beyond that, the sequences that were used longest ago are "
           "removed."),
    Option("store_days", "number", 7.0,
           "Remove a sequence from the store when nothing has used it for this many days.", least=0.001),
    Option("store_tokens", "whole", 32,
           "Store only sequences of at least this many tokens. Shorter ones are computed again.", least=1),
    Option("lease", "number", 30.0,
           "A replica holds a session for this many seconds unless it renews its lease.", least=1),
    Option("kv_events", "whole", None,
           "The first replica publishes KV events in vLLM's format on this port. The other replicas take the "
           "next ports.", least=1024, most=65000),
    Option("event_tokens", "whole", PREFIX_GRID_TOKENS,
           "A block in KV events has this many tokens; the default is the grid of prefix caches.", least=1),
)  # fmt: skip
"""The options of `hybrid-memory serve` that concern a fleet. The command itself reads them."""

_NEEDED = {"ray": "ray[serve]"}
_REMEDY = "pip install 'hybridmem[cluster]'"


def has_replicas(chosen: Chosen) -> bool:
    """Return whether the options ask for several replicas, each in a process of its own."""
    return bool(chosen["replicas"] > 1 or (chosen["max_replicas"] or 1) > 1)


def is_fleet(chosen: Chosen) -> bool:
    """Return whether the options ask for several replicas, as `has_replicas` does.

    Raises SpecError if an option of a fleet would have no effect.
    """
    from hybridmem.memory import SpecError

    if has_replicas(chosen):
        return True
    for row in FLEET:
        if chosen[row.name] != row.default:
            raise SpecError(f"{row.flag}={chosen[row.name]!r} is of several replicas; give --replicas 2, or leave it")
    return False


def find_cluster(module: str) -> Any:
    """Return a module of the package `cluster`.

    Raises SpecError if a package is missing. The message says what to install.
    """
    from hybridmem.memory import SpecError

    if missing := [package for name, package in _NEEDED.items() if find_spec(name) is None]:
        raise SpecError(f"several replicas need {', '.join(missing)}; install it with: {_REMEDY}")
    return import_module(f"hybridmem.cluster.{module}")


def run_fleet(chosen: Chosen) -> None:
    """Serve from several replicas, on a Ray that is started on this machine, until a signal says to stop."""
    find_cluster("commands.serve").run_local(chosen)
