"""Which rows attention keeps when it may not keep them all.

The newest rows of a sequence are never touched: a rollback may want to see them. When rows are older than the rollback
window they fold, `every` tokens at a time: they join the rows that were kept before, and those that the policy ranks
lowest are forgotten. Scores change only then, from the queries of the rows that fold, so a token that is taken back
leaves no trace in them. Positions stay what they were: nothing is rotated again.

A policy is a subclass of `EvictionPolicy`, mostly of ten lines: see `docs/how-to/adding-a-policy.md`. `Quest` forgets
nothing and reads little.
"""

from memory.eviction.policies import H2O, TOVA, ExpectedAttention, KNorm, PyramidKV, Recent, Scissorhands, SnapKV
from memory.eviction.policy import Budget, Candidates, EvictionPolicy
from memory.eviction.quest import Quest

__all__ = [
    "H2O", "TOVA", "Budget", "Candidates", "EvictionPolicy", "ExpectedAttention", "KNorm", "PyramidKV", "Quest",
    "Recent", "Scissorhands", "SnapKV",
]  # fmt: skip
