"""Says what it costs to go on from each node of a tree: what is kept of it, and what must be computed again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.stored.nodes import Node, each_tokens
from hybridmem.memory import Sequence
from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.prefix import PrefixCache

_PLACES = {"host": "from host memory", "disk": "from files", "nothing": "nothing is kept of it"}

_HELD_SECONDS = 0.005
"""Time for which looking up the nodes of a tree keeps the engine from its next step."""


@dataclass(frozen=True)
class Cost:
    """Says what going on from a node costs.

    Attributes:
        source: "window" (rolled back from a later position), "checkpoint", "host", "disk" or "nothing".
        compute_tokens: to be computed before the first new token.
        replay_tokens: those of them that were computed before, and of which no state is left.
        seconds: at the speed of the last prompts; None where none was measured.
        own_bytes, shared_bytes: of the checkpoint at the node, if there is one: what only it holds, and the rest.
    """

    source: str
    compute_tokens: int
    replay_tokens: int = 0
    seconds: float | None = None
    own_bytes: int = 0
    shared_bytes: int = 0

    @property
    def words(self) -> str:
        n = f"{self.compute_tokens:,} token{'s' * (self.compute_tokens != 1)} to compute"
        if self.source == "window":
            return f"rolled back within the window, {n}"
        return f"{_PLACES.get(self.source, 'from a checkpoint')}, {n}"

    def to_json(self) -> dict[str, Any]:
        return {
            "from": self.source, "compute_tokens": self.compute_tokens, "replay_tokens": self.replay_tokens,
            "seconds": self.seconds, "words": self.words,
        }  # fmt: skip


def find_costs(engine: Engine, owner: bytes, nodes: list[Node]) -> dict[str, Cost]:
    """Return the cost of each node of a tree, each behind its parent. It waits for the step in progress.

    Nothing changes. Cost: O(tokens) for each node; steps wait for a few milliseconds at a time, however many there are.
    """
    left, costs = each_tokens(nodes), dict[str, Cost]()
    while True:
        with engine.lock:
            end = time.perf_counter() + _HELD_SECONDS
            for node, tokens in left:
                costs[node.id] = cost_of(engine, owner, tokens)
                if node.parent is not None and node.parent not in costs:  # a message: its prompt is known by now
                    costs[node.parent] = cost_of(engine, owner, tokens[: node.n_prompt])
                if time.perf_counter() > end:
                    break
            else:
                return costs


def cost_of(engine: Engine, owner: bytes, tokens: Int64s) -> Cost:
    """Return what it costs to go on behind these tokens. The caller holds the engine's lock."""
    prefixes = engine.prefixes
    if prefixes is None:
        return Cost("nothing", len(tokens))
    lookup = prefixes.find(np.append(tokens, -1), owner)  # nothing goes on with -1: all of the tokens may be reused
    marks = prefixes.checkpoints_of(tokens, owner)
    nearest = marks[-1] if marks and marks[-1].length == lookup.reused else None
    n_missing = len(tokens) - lookup.reused
    own, shared = _bytes_of(prefixes, nearest) if nearest is not None and n_missing <= 1 else (0, 0)
    seconds_a_token = prefixes.seconds_a_token
    seconds = None if seconds_a_token is None else n_missing * seconds_a_token
    return Cost(lookup.source, n_missing, lookup.replayed, seconds, own, shared)


def missing_tokens(engine: Engine, owner: bytes, tokens: Int64s) -> int:
    """Count the tokens that would be computed again. It waits for the step in progress."""
    with engine.lock:
        return cost_of(engine, owner, tokens).compute_tokens


def _bytes_of(prefixes: PrefixCache, checkpoint: Sequence) -> tuple[int, int]:
    own = prefixes.memory.private_bytes(checkpoint)
    return own, max(0, prefixes.memory.counters.held_bytes(checkpoint) - own)
