"""Finds out whether all machines of a Ray see the same folder. A database in a shared folder needs that."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from hybridmem.memory import SpecError

Machine = Callable[[Callable[[str], bool], str], bool]
"""Calls a function with a path on one machine, and returns its result."""


def check_shared(folder: str, machines: Sequence[Machine]) -> None:
    """Raise SpecError unless a file that the first machine writes in the folder is visible on all others."""
    path = f"{folder}/.shared-{uuid4().hex}"
    machines[0](_write, path)
    try:
        n_blind = sum(not machine(os.path.exists, path) for machine in machines)
    finally:
        machines[0](_remove, path)
    if n_blind:
        raise SpecError(
            f"sessions: {folder} is not the same folder on all machines: {n_blind} of {len(machines)} do not see what "
            "is written there; name one that they share, or leave it out: then stored responses are refused"
        )


def machines_of_ray() -> list[Machine]:
    """Return the machines of the Ray that this process is connected to."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def machine_of(node: str) -> Machine:
        there = NodeAffinitySchedulingStrategy(node, soft=False)

        def call(work: Callable[[str], bool], path: str) -> bool:
            task: Any = ray.remote(work).options(num_cpus=0, scheduling_strategy=there)
            return bool(ray.get(task.remote(path)))

        return call

    return [machine_of(node["NodeID"]) for node in ray.nodes() if node["Alive"]]


def _write(path: str) -> bool:
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    Path(path).touch()
    return True


def _remove(path: str) -> bool:
    Path(path).unlink(missing_ok=True)
    return True
