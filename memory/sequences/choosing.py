"""Says which queries of a step choose rows by an index, and what they have chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s, ranges, starts_of
from hybridmem.memory.interface import Packed


@dataclass(frozen=True)
class ChosenRows:
    """Holds the rows that an index has chosen for the queries of a step: `Step.choose` returns it, for `Step.attend`.

    Attributes:
        n_chosen: how many rows a query reads at most.
        positions: (C,) int64, the positions of rows, query after query and oldest first, of those requests that have
            more rows than `n_chosen`. A query reads `n_chosen` of them, or all up to itself if these are fewer. None if
            there is no such request.
    """

    n_chosen: int
    positions: Tensor | None


@dataclass(frozen=True)
class Choosing:
    """Divides the requests of a step into those that have more rows than a query reads, and the others.

    Attributes:
        requests, tokens: the numbers of the first, and the packed numbers of their tokens.
        others, other_tokens: those of the others.
        n_rows, cu_rows: how many rows each of `tokens` chooses, and where these begin among all.
    """

    requests: Int64s
    tokens: Int64s
    others: Int64s
    other_tokens: Int64s
    n_rows: Int64s
    cu_rows: Int64s

    @staticmethod
    def of(packed: Packed, n_chosen: int) -> Choosing:
        """Divide the requests of a step for queries that read at most `n_chosen` rows."""
        chooses = packed.ends > n_chosen
        requests, others = chooses.nonzero()[0], (~chooses).nonzero()[0]
        tokens, other_tokens = (
            ranges(packed.cu_seqlens[:-1][own], packed.cu_seqlens[1:][own]) for own in (requests, others)
        )
        n_rows = np.minimum(packed.positions[tokens] + 1, n_chosen)
        return Choosing(requests, tokens, others, other_tokens, n_rows, starts_of(n_rows))
