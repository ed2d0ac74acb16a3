"""Runs a seed of each simulation, from the first arrival until nobody is left."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.operation.serving_world import ServingWorld
from tests.operation.simulated_time import SimulatedLoop, simulate
from tests.operation.world import World


def operate_engine(seed: int) -> Counter[str]:
    """Run a seed of a simulated engine, and count each event. Raises AssertionError where a promise is broken."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, Path(folder))
        world.run()
        return world.events


def operate_server(seed: int) -> Counter[str]:
    """Run a seed of a simulated server, and count each event. Raises AssertionError where a promise is broken."""
    events = Counter[str]()

    async def serve(loop: SimulatedLoop) -> None:
        world = ServingWorld(seed, loop)
        await world.run()
        events.update(world.events)

    simulate(serve)
    return events


SIMULATIONS: dict[str, Callable[[int], Counter[str]]] = {"engine": operate_engine, "server": operate_server}
EXPECTED = {
    "engine": {
        "stop", "length", "cancelled", "deadline", "error", "model failed", "room taken", "preempted", "reused",
        "drafted",
    },
    "server": {"200", "left", "model failed", "room taken", "reused"},
}  # fmt: skip
"""What must have happened in some seed: a simulation in which nothing does proves nothing."""
