"""Says how many replicas a fleet wants: by tokens in flight, and by the share of the memory that requests hold.

Cached prefixes count as free: they give way. Replicas are added at once, and taken away one by one when the load has
been low for a while, since a replica that goes takes what it has cached with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

TARGET_TOKENS = 65_536
"""Tokens of prompts in flight that a replica should have at most."""
MOST_HELD_SHARE = 0.8
PATIENCE_SECONDS = 120.0


def wanted_replicas(n_replicas: int, tokens: Collection[float], held_shares: Collection[float]) -> int:
    """Return how many replicas the load wants, at least one.

    Args:
        tokens: of prompts in flight, for each replica that has reported.
        held_shares: of each one's budget that requests hold, from 0 to 1.
    """
    by_tokens = sum(tokens) / TARGET_TOKENS
    mean_held = sum(held_shares) / len(held_shares) if held_shares else 0.0
    return max(1, math.ceil(by_tokens), math.ceil(n_replicas * mean_held / MOST_HELD_SHARE))


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
    tokens, held = (list(metrics.get(name, {}).values()) for name in ("tokens_in_flight", "held_share"))
    n_replicas = context.target_num_replicas
    state = dict(context.policy_state or {})
    wanted = wanted_replicas(n_replicas, tokens, held)
    n, low_since = decide(n_replicas, wanted, state.get("low_since"), context.current_time or 0.0)
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(n, low), high), {**state, "low_since": low_since}
