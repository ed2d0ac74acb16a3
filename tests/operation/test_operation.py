"""Seeds of simulated operation: two by default, in which everything happens; `OPERATION_SEEDS=5000` for a long run."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from tests.operation.serving_world import ServingWorld
from tests.operation.simulated_time import SimulatedLoop, simulate
from tests.operation.world import World

FIRST, N_SEEDS = 3, int(os.environ.get("OPERATION_SEEDS", "2"))


def test_every_request_ends_and_says_what_it_would_say_alone(tmp_path: Path) -> None:
    events = Counter[str]()
    for seed in range(FIRST, FIRST + N_SEEDS):
        world = World(seed, tmp_path / str(seed))
        world.run()
        events += world.events
    wanted = {"stop", "length", "cancelled", "deadline", "error", "model failed", "room taken", "preempted", "reused"}
    assert events.keys() >= wanted | {"drafted"}


def test_every_client_of_a_server_gets_a_whole_answer_or_error() -> None:
    events = Counter[str]()
    for seed in range(FIRST, FIRST + N_SEEDS):

        async def serve(loop: SimulatedLoop, seed: int = seed) -> None:
            world = ServingWorld(seed, loop)
            await world.run()
            events.update(world.events)

        simulate(serve)
    wanted = {"200", "left", "model failed", "room taken", "reused"}
    assert events.keys() >= wanted
