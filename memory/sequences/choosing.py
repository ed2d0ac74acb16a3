"""Says which queries of a step choose rows by an index, and what they have chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s, ceil_div, ranges, starts_of
from hybridmem.memory.interface import Packed


@dataclass(frozen=True)
class ChosenRows:
    """Holds the rows that an index has chosen for the queries of a step: `Step.choose` returns it, for `Step.attend`.

    Attributes:
        n_chosen: how many rows a query reads at most.
        positions: (C,) int64, the positions of rows, query after query and oldest first, of those requests that have
            more rows than `n_chosen`. A query reads `n_chosen` of them, or all up to itself if these are fewer. None if
            there is no such request. Where rows are chosen in spans, these are numbers of spans.
        span_tokens: how many rows are chosen together.
    """

    n_chosen: int
    positions: Tensor | None
    span_tokens: int = 1


@dataclass(frozen=True)
class Choosing:
    """Divides the requests of a step into those with more rows than a query reads, and the others.

    Attributes:
        requests, tokens: the numbers of the first, and the packed numbers of their tokens.
        others, other_tokens: those of the others.
        ends: how many rows each of `tokens` sees.
        n_keys: how many keys of the index each of `tokens` chooses.
    """

    requests: Int64s
    tokens: Int64s
    others: Int64s
    other_tokens: Int64s
    ends: Int64s
    n_keys: Int64s

    @staticmethod
    def of(packed: Packed, n_chosen: int, span_tokens: int) -> Choosing:
        """Divide the requests of a step for queries that choose at most `n_chosen` rows."""
        n_keys = n_chosen // span_tokens
        chooses = packed.ends // span_tokens > n_keys
        requests, others = chooses.nonzero()[0], (~chooses).nonzero()[0]
        tokens, other_tokens = (
            ranges(packed.cu_seqlens[:-1][own], packed.cu_seqlens[1:][own]) for own in (requests, others)
        )
        ends = packed.positions[tokens] + 1
        return Choosing(requests, tokens, others, other_tokens, ends, np.minimum(ends // span_tokens, n_keys))


class Spread(NamedTuple):
    """Says which rows the queries of a step read, as pieces of at most `unit` rows that lie in one page.

    A piece begins at `offsets` + span_tokens * the number of the span that it belongs to.

    Attributes:
        unit: how many rows a piece has; the last one of a query may have fewer.
        n_rows: (Q,) how many rows each query reads.
        cu_pieces: (Q + 1,) query i reads the pieces [cu_pieces[i], cu_pieces[i + 1]).
        spans: (P,) the index of each piece's span among all that were chosen. Rows after the last whole span belong to
            none: they have the index after the last.
        offsets: (P,) see above.
    """

    unit: int
    n_rows: Int64s
    cu_pieces: Int64s
    spans: Int64s
    offsets: Int64s

    @staticmethod
    def of(choosing: Choosing, span_tokens: int, page_tokens: int) -> Spread:
        """Divide the rows that queries read: whole spans, and the rows between the last whole span and each query."""
        unit = math.gcd(span_tokens, page_tokens)
        n_rest, n_whole = choosing.ends % span_tokens, choosing.n_keys * (span_tokens // unit)
        n_pieces = n_whole + ceil_div(n_rest, unit)
        cu_pieces, cu_keys = starts_of(n_pieces), starts_of(choosing.n_keys)
        query = np.repeat(np.arange(len(n_pieces)), n_pieces)
        own, at = np.divmod((np.arange(len(query)) - cu_pieces[query]) * unit, span_tokens)
        is_rest = own >= choosing.n_keys[query]
        spans = np.where(is_rest, cu_keys[-1], cu_keys[query] + own)
        offsets = at + is_rest * (choosing.ends - n_rest)[query]
        return Spread(unit, choosing.n_keys * span_tokens + n_rest, cu_pieces, spans, offsets)
