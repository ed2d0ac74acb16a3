"""Says how many replicas a fleet wants: by the tokens in flight, and by the free bytes of its memories.

The bytes of cached prefixes count as free: they give way. Replicas are added at once, and taken away one by one when
the load has been low for a while, since a replica that goes takes what it has cached with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

TARGET_TOKENS = 65_536
"""Tokens of prompts in flight that a replica should have at most."""
LEAST_FREE_SHARE = 0.2
"""Of the budgets of all replicas together that should be free: a request that finds no room waits."""
PATIENCE_SECONDS = 120.0
REPORTED = ("tokens_in_flight", "free_bytes", "budget_bytes")
"""What each replica reports."""


def wanted_replicas(
    n_replicas: int, tokens: Collection[float], free_bytes: Collection[float], budget_bytes: Collection[float]
) -> int:
    """Return how many replicas the load wants, at least one.

    Args:
        n_replicas: that there are; those that have not reported count as the mean of the others.
        tokens: of prompts in flight, for each replica that has reported.
        free_bytes, budget_bytes: of each one's memory.
    """
    by_tokens = math.ceil(sum(tokens) / TARGET_TOKENS)
    budgets = sum(budget_bytes)
    held_share = (budgets - sum(free_bytes)) / budgets if budgets else 0.0
    return max(1, by_tokens, math.ceil(round(n_replicas * held_share / (1 - LEAST_FREE_SHARE), 6)))


def decide(n_replicas: int, wanted: int, low_since: float | None, now: float) -> tuple[int, float | None]:
    """Return how many replicas there should be now, and since when fewer were wanted.

    Args:
        low_since: what the last call returned.
    """
    if wanted >= n_replicas:
        return wanted, None
    if low_since is None or now - low_since < PATIENCE_SECONDS:
        return n_replicas, now if low_since is None else low_since
    return n_replicas - 1, now


def scale(context: Any) -> tuple[int, dict[str, Any]]:
    """Decide for Ray Serve: an `AutoscalingPolicy` function, which gets an `AutoscalingContext`."""
    metrics = context.aggregated_metrics or {}
    tokens, *of_bytes = (list(metrics.get(name, {}).values()) for name in REPORTED)
    n_replicas = context.target_num_replicas
    state = dict(context.policy_state or {})
    wanted = wanted_replicas(n_replicas, tokens, *of_bytes)
    n, low_since = decide(n_replicas, wanted, state.get("low_since"), context.current_time or 0.0)
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(n, low), high), {**state, "low_since": low_since}
