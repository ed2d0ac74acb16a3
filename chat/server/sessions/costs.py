"""Computes what it costs to continue from each node of a tree: what is kept of it, and what must be computed again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.stored.nodes import Node, each_tokens, prefix_owner
from hybridmem.memory import Sequence
from hybridmem.memory.blocks import Int64s
from hybridmem.memory.prefix import PrefixCache

_PLACES = {"host": "from host memory", "disk": "from files", "nothing": "nothing is kept of it"}

_HELD_SECONDS = 0.005
"""Looking up nodes may keep the engine from its next step for this many seconds."""


@dataclass(frozen=True)
class Cost:
    """Holds the cost of continuing from a node.

    Attributes:
        source: "window" (rolled back from a later position), "checkpoint", "host", "disk" or "nothing".
        compute_tokens: tokens that must be computed before the first new token.
        replay_tokens: those of them that were computed before, but have no state left.
        seconds: the time for this, at the speed of the last prompts. None: no speed was measured yet.
        own_bytes, shared_bytes: the bytes that only the node's checkpoint holds, and those that it shares.
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
    """Return the cost of each node of a tree. Each node comes after its parent. This waits for the step in progress.

    Nothing changes. Cost: O(tokens) for each node. However many nodes there are, steps wait for a few milliseconds at a
    time.
    """
    left, costs, owner = each_tokens(nodes), dict[str, Cost](), prefix_owner(owner)
    while True:
        with engine.lock:
            end = time.perf_counter() + _HELD_SECONDS
            for node, tokens in left:
                costs[node.id] = cost_of(engine, owner, tokens)
                # The node is a message whose prompt is known by now.
                if node.parent is not None and node.parent not in costs:
                    costs[node.parent] = cost_of(engine, owner, tokens[: node.n_prompt])
                if time.perf_counter() > end:
                    break
            else:
                return costs


def cost_of(engine: Engine, owner: bytes, tokens: Int64s) -> Cost:
    """Return the cost of continuing after these tokens. The caller holds the engine's lock."""
    prefixes = engine.prefixes
    if prefixes is None:
        return Cost("nothing", len(tokens))
    # No cached prompt has a token -1, so a lookup may reuse all of the real tokens.
    lookup = prefixes.find(np.append(tokens, -1), owner)
    marks = prefixes.checkpoints_of(tokens, owner)
    nearest = marks[-1] if marks and marks[-1].length == lookup.reused else None
    n_missing = len(tokens) - lookup.reused
    own, shared = _bytes_of(prefixes, nearest) if nearest is not None and n_missing <= 1 else (0, 0)
    seconds_a_token = prefixes.seconds_a_token
    seconds = None if seconds_a_token is None else n_missing * seconds_a_token
    return Cost(lookup.source, n_missing, lookup.replayed, seconds, own, shared)


def missing_tokens(engine: Engine, owner: bytes, tokens: Int64s) -> int:
    """Count the tokens that would be computed again. It waits for the step in progress.

    Args:
        owner: the owner of the prefixes.
    """
    with engine.lock:
        return cost_of(engine, owner, tokens).compute_tokens


def _bytes_of(prefixes: PrefixCache, checkpoint: Sequence) -> tuple[int, int]:
    own = prefixes.memory.private_bytes(checkpoint)
    return own, max(0, prefixes.memory.counters.held_bytes(checkpoint) - own)
