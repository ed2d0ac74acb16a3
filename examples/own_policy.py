"""Keeps the rows of keys and values that a policy of your own ranks highest."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybridmem import HybridMemory, load_model
from hybridmem.memory.eviction import Candidates, EvictionPolicy


@dataclass(frozen=True)
class LongValues(EvictionPolicy):
    """Keeps rows whose values are long."""

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return rows.values.float().norm(dim=-1)  # (key/value heads, rows)


model = load_model("embedded")
tokens = [1, *range(4, 400)]
for policy in (None, LongValues(64, sinks=4)):
    memory = HybridMemory(model.memory_spec.with_policy(policy), budget="64MiB", rollback_window=32)
    memory.run(model, {memory.open(): tokens})
    held = memory.usage().by_group
    attention = sum(n_bytes for group, n_bytes in held.items() if group.startswith("attention"))
    print("every row" if policy is None else policy.label, "takes", attention, "bytes of attention")
