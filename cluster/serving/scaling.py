"""Decides how many replicas a fleet needs, by the tokens in flight and the free bytes of its memories.

The bytes of cached prefixes count as free, because prefixes are evicted when room is needed. Replicas are added at
once. They are removed one by one, after the load has been low for a while, because a replica's cache is lost with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

TARGET_TOKENS = 65_536
"""A replica should have at most this many tokens of prompts in flight."""
LEAST_FREE_SHARE = 0.2
"""This share of the budgets of all replicas together should be free. A request that finds no room has to wait."""
PATIENCE_SECONDS = 120.0
REPORTED = ("tokens_in_flight", "free_bytes", "budget_bytes")
"""The names of the numbers that each replica reports."""


def wanted_replicas(
    n_replicas: int, tokens: Collection[float], free_bytes: Collection[float], budget_bytes: Collection[float]
) -> int:
    """Return how many replicas the load needs, at least one.

    Args:
        n_replicas: the present number of replicas. Those that have not reported count as the mean of the others.
        tokens: the tokens of prompts in flight, for each replica that has reported.
        free_bytes, budget_bytes: for each replica, the free bytes of its memory, and its budget.
    """
    by_tokens = math.ceil(sum(tokens) / TARGET_TOKENS)
    budgets = sum(budget_bytes)
    held_share = (budgets - sum(free_bytes)) / budgets if budgets else 0.0
    return max(1, by_tokens, math.ceil(round(n_replicas * held_share / (1 - LEAST_FREE_SHARE), 6)))


def decide(n_replicas: int, wanted: int, low_since: float | None, now: float) -> tuple[int, float | None]:
    """Return how many replicas there should be now, and since when fewer were wanted.

    Args:
        low_since: the value that the last call returned.
    """
    if wanted >= n_replicas:
        return wanted, None
    if low_since is None or now - low_since < PATIENCE_SECONDS:
        return n_replicas, now if low_since is None else low_since
    return n_replicas - 1, now


def scale(context: Any) -> tuple[int, dict[str, Any]]:
    """Decide the number of replicas for Ray Serve.

    This is an `AutoscalingPolicy` function; it gets an `AutoscalingContext`.
    """
    metrics = context.aggregated_metrics or {}
    tokens, *of_bytes = (list(metrics.get(name, {}).values()) for name in REPORTED)
    n_replicas = context.target_num_replicas
    state = dict(context.policy_state or {})
    wanted = wanted_replicas(n_replicas, tokens, *of_bytes)
    n, low_since = decide(n_replicas, wanted, state.get("low_since"), context.current_time or 0.0)
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(n, low), high), {**state, "low_since": low_since}
