"""Holds the eviction policies, which choose which rows of keys and values attention keeps if it may not keep all.

The newest rows of a sequence always stay, because a rollback may need them. Rows that are older than the rollback
window fold, `every` tokens at a time: they join the rows that were kept before, and the rows that the policy ranks
lowest are evicted. Scores change only at folds, from the queries of the rows that fold. Evicted rows are put aside for
one more window. After a rollback to a length at which they were still kept, queries see them again. So a token that is
rolled back leaves no trace. Positions do not change, and keys are not rotated again.

A policy is a subclass of `EvictionPolicy`, often of ten lines: see `docs/how-to/adding-a-policy.md`. `Quest` is a
policy that evicts no row: its queries read few pages.
"""

from hybridmem.memory.eviction.policies import (
    H2O,
    TOVA,
    ExpectedAttention,
    KNorm,
    PyramidKV,
    Recent,
    Scissorhands,
    SnapKV,
)
from hybridmem.memory.eviction.policy import Budget, Candidates, EvictionPolicy
from hybridmem.memory.eviction.quest import Quest

__all__ = [
    "H2O", "TOVA", "Budget", "Candidates", "EvictionPolicy", "ExpectedAttention", "KNorm", "PyramidKV", "Quest",
    "Recent", "Scissorhands", "SnapKV",
]  # fmt: skip
