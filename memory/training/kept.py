"""Lets an eviction policy choose which rows later chunks read, and gathers these rows.

Which rows are kept has no gradient. Rows that were read have one, and rows that were evicted have none from where they
were not read any more. A chunk of a tape is a step of a memory: its tokens read what had been kept before it, the rows
that had not folded yet, and the chunk's own rows up to each token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.attention.kept_rows import KeptRows
from hybridmem.memory.eviction import Budget, EvictionPolicy
from hybridmem.memory.kernels.signature import Scoring
from hybridmem.memory.sequences.folding import TailRules
from hybridmem.memory.specs import AttentionSpec, LayerSpec, MemorySpec


class Kept(NamedTuple):
    """Says which of the rows before a fold point are kept.

    Attributes:
        at: the fold point.
        positions: (G, n) int64, ascending.
        scores: (G, n) float32, which the policy has given them.
    """

    at: int
    positions: Tensor
    scores: Tensor

    @staticmethod
    def nothing(n_groups: int, device: torch.device) -> Kept:
        """Return what is kept at the beginning of a text."""
        positions = torch.zeros(n_groups, 0, dtype=torch.int64, device=device)
        return Kept(0, positions, torch.zeros(n_groups, 0, device=device))


def with_own_policies(spec: MemorySpec) -> MemorySpec:
    """Return the spec with the policy that each layer has by `EvictionPolicy.of_layer`, as memories do."""
    policies = [m.policy for memories in spec.layers for m in memories if isinstance(m, AttentionSpec)]
    n_layers, numbers = Counter(policies), Counter[Budget | None]()

    def own(memory: LayerSpec) -> LayerSpec:
        if not isinstance(memory, AttentionSpec) or memory.policy is None:
            return memory
        policy = memory.policy
        numbers[policy] += 1
        return replace(memory, policy=policy.of_layer(numbers[policy] - 1, n_layers[policy]))

    return replace(spec, layers=tuple(tuple(map(own, memories)) for memories in spec.layers))


class Folding:
    """Folds rows as a memory with this rollback window does.

    Attributes:
        observes: True if the policy reads the queries of rows that fold.
    """

    def __init__(self, spec: AttentionSpec, rollback_window: int) -> None:
        assert isinstance(spec.policy, EvictionPolicy)
        self._spec, self.observes = spec, spec.policy.needs_queries
        self._rules = TailRules.of_attention(rollback_window, spec.policy.every, 0)
        # Evicted rows need not be put aside: earlier chunks still have them.
        self._kept_rows = KeptRows(spec.policy, None, 0)

    def point(self, length: int) -> int:
        """Return the fold point up to which rows have folded when a text has this length."""
        return int(self._rules.body_at(np.array([length]))[0])

    def fold(self, kept: Kept, rows_NXD: Tensor, old: tuple[Tensor, ...], at: int, scoring: Scoring) -> Kept:
        """Let the policy choose among the kept rows and those of the tokens [kept.at, at).

        Args:
            rows_NXD: keys, values unless they are parts of the keys, and queries if the policy observes them.
            old: the kept rows, (n, G, D) for keys, and for values unless they are parts of the keys.
        """
        body = [torch.stack(old, 1), kept.positions.T.float(), kept.scores.T]
        found, _ = self._kept_rows.fold(body, kept.at, at, rows_NXD, self._spec, scoring)
        return Kept(at, found.positions, found.scores)
