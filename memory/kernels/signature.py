"""The one signature that every set of kernels has. Shape legend: `memory.interface`.

A "flat" is all bytes of the arena seen as one dtype; rows and states are found in it by element offset. Flats, offsets
and weights are used many times: what `Kernels.prepare` makes of them saves a conversion at each call. Tensors will do
as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from memory.blocks.arrays import Int64s
from memory.blocks.staging import Placed
from memory.quantization import Storage

Prepared = Any
"""A tensor, or what `Kernels.prepare` made of it."""


@dataclass(frozen=True)
class PagedBatch:
    """What attention needs to know of a step; the same for all layers.

    A page holds `page_tokens` rows head by head, (G, page_tokens, D): row r of head g begins (g page_tokens + r) D
    after the page does.

    Attributes:
        cu_seqlens: (S + 1,) request i owns queries [cu_seqlens[i], cu_seqlens[i + 1]); host. Short requests come first.
        kv_lengths: (S,) rows each request can see, its new ones included; host.
        pages: (all pages,) element offset of each page, request after request; (G, all pages) where each key/value head
            reads others.
        cu_pages: (S + 1,) request i has pages [cu_pages[i], cu_pages[i + 1]); host.
        page_tokens: rows a page.
        layouts: what kernels have computed from these arrays, by their own keys.
    """

    cu_seqlens: Int64s
    kv_lengths: Int64s
    pages: Prepared
    cu_pages: Int64s
    page_tokens: int
    layouts: dict[object, Any] = field(default_factory=dict, compare=False, repr=False, init=False)

    def at(self, pages: Prepared) -> PagedBatch:
        """Return this batch with its pages elsewhere. Layouts stay: they do not depend on where pages are."""
        moved = replace(self, pages=pages)
        moved.layouts.update(self.layouts)
        return moved


@dataclass(frozen=True)
class PageChoice:
    """What queries choose pages from; the same for all layers.

    Attributes:
        pages: (all pages,) element offset of each page up to its query, query after query.
        cu_pages: (Q + 1,) query i chooses from pages [cu_pages[i], cu_pages[i + 1]); host.
        n_first, n_last: pages that are chosen whatever they score: the first ones, and (Q,) the last ones; host.
        cu_chosen: (Q + 1,) query i chooses cu_chosen[i + 1] - cu_chosen[i] pages, n_first + n_last[i] or more, or all;
            host.
        layouts: what kernels have computed from these arrays, by their own keys.
    """

    pages: Prepared
    cu_pages: Int64s
    n_first: int
    n_last: Int64s
    cu_chosen: Int64s
    layouts: dict[object, Any] = field(default_factory=dict, compare=False, repr=False, init=False)


class Scoring(NamedTuple):
    """How queries and keys become weights: softmax of scores s = scale q . k.

    A row whose score is -inf has no weight. A query none of whose rows has another score gets NaN, which is 0 / 0;
    beside a sink, zeros.

    Attributes:
        window: rows that a query sees, the newest its own; None for all.
        softcap: scores become cap tanh(s / cap) (Gemma Team 2024, "Gemma 2"); None for no cap.
        sinks_H: for each query head the score of a row that has no value and takes its share of the weight ("learned
            sinks", Xiao et al. 2023, as in gpt-oss); None for none.
        bias_HL: (H, L) float32, added to the score of a row that stands d before the query: column min(d, L - 1)
            (Raffel et al. 2020, "T5"); None for none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Prepared | None = None
    bias_HL: Prepared | None = None


@dataclass(frozen=True)
class FoldedRows:
    """Rows that a storage keeps, older than those in a step's pages: of one attention, for all requests of a step.

    Attributes:
        storage: how they are kept.
        shapes: of the parts of a block: those of its keys, then as many of its values; n_rows a block, some of them
            perhaps not in use.
        flats: of each part, the arena as its dtype from the part's place in a block on.
        blocks: (all blocks,) byte address of each block, request after request; (G, all blocks) where each key/value
            head reads others. On the device.
        cu_blocks: (S + 1,); host.
        lengths: (S,) rows of each request; host.
        head_dim: channels a row.
    """

    storage: Storage
    shapes: tuple[tuple[int, ...], ...]
    flats: tuple[Prepared, ...]
    blocks: Tensor
    cu_blocks: Int64s
    lengths: Int64s
    head_dim: int

    @property
    def block_rows(self) -> int:
        return self.shapes[0][1]


class Tail(NamedTuple):
    """Tokens that came after the states of S runs and before the runs: rings remember what they did, so that states
    need not move.

    Position p of run i counts from its source state on: its ring has tokens [0, counts[i]), the run's own rows follow.
    Position p is in slot (firsts[i] + p) % ring_rows.

    Attributes:
        flats: of each ring, the arena as its dtype from the ring's place in a block on; the rings of a block have
            equally many slots.
        sources, targets: of each ring, (S,) element offsets of the blocks to read and to write; those may be one if no
            new token needs the slot of an old one. What a matrix state's tokens do is written, at least from the fold
            on; rows are only read.
        firsts, counts: (S,).
        folds: (S,) the state written to a target of `StateSlots` is that before position folds[i], at most that behind
            the run.
    """

    flats: tuple[Prepared, ...]
    sources: tuple[Prepared, ...]
    targets: tuple[Prepared, ...]
    ring_rows: int
    firsts: Prepared
    counts: Prepared
    folds: Prepared


class StateSlots(NamedTuple):
    """Where one state tensor of S runs begins and ends.

    Attributes:
        cu_rows: (S + 1,) run i covers rows [cu_rows[i], cu_rows[i + 1]).
        flat: the arena; sources, targets: (S,) element offsets, source -1 for a state full of `initial`.
        shape: of one state.
        tail: what came between the states and the runs; None for nothing. With a tail a target of -1 is not written.
    """

    cu_rows: Placed
    flat: Prepared
    sources: Prepared
    targets: Prepared
    shape: tuple[int, ...]
    initial: float
    tail: Tail | None = None


class Erase(NamedTuple):
    """The term (S a) b^T of `Kernels.matrix_scan`.

    Attributes:
        a: (T, G, N), shared by the heads of a group.
        b: (T, H, N); None for -strength k, the delta rule.
        after_decay: a reads S diag(w) instead of S.
    """

    a: Tensor
    b: Tensor | None
    after_decay: bool


class Kernels(Protocol):
    """The functions that touch the arena's bytes. `reference` is the oracle; the others must agree with it."""

    def prepare(self, tensor: Tensor) -> Prepared:
        """The same numbers, as these kernels take them. Shares memory with the tensor."""
        ...

    def write_rows_(self, flat: Prepared, offsets_T: Prepared, rows_TR: Tensor) -> None:
        """flat[offsets[t] : offsets[t] + R] = rows[t]. Offsets do not overlap."""
        ...

    def read_rows(self, flat: Prepared, offsets_T: Prepared, shape: tuple[int, ...], initial: float) -> Tensor:
        """(T, *shape): the elements from each offset on; `initial` where the offset is -1."""
        ...

    def plan_attention(
        self, batch: PagedBatch, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device,
        window: int | None, folded: FoldedRows | None = None,
    ) -> None:  # fmt: skip
        """Said before, while a step's plan is being uploaded: `paged_attention` of this batch is to come.

        Args:
            heads: query heads, key/value heads, and channels a head.
        """
        ...

    def paged_attention(
        self, q_THD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, n_kv_heads: int, scoring: Scoring,
        folded: FoldedRows | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal grouped-query attention over pages: (T, H, D).
        The last query of a request sees all its rows, or the last `window`.

        Rows that are `folded` come before those in pages, are seen by every query, and go with no window.
        """
        ...

    def plan_choice(self, choice: PageChoice, device: torch.device) -> None:
        """Said before, while a step's plan is being uploaded: `choose_pages` of this choice is to come."""
        ...

    def choose_pages(
        self, q_QHD: Tensor, least: Prepared, greatest: Prepared, choice: PageChoice, n_kv_heads: int
    ) -> Tensor:
        """Element offsets of the pages that each key/value head should read, (G, all chosen), query after query, oldest
        first.

        A page's score is the most that any query head of the group could score a key between the page's bounds, the (G,
        D) elements of `least` and of `greatest` from its offset on: max_s sum_d max(q_sd least_d, q_sd greatest_d). Of
        equal pages the older is chosen, and one whose score is NaN before all others (Tang et al. 2024, "Quest", Alg.
        1).
        """
        ...

    def attend_rows(
        self, q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, scoring: Scoring, batch: PagedBatch | None = None
    ) -> Tensor:
        """`paged_attention` for one request whose rows are at hand, R >= T: (T, H, D).

        Args:
            batch: of this request with a page a row, as `plan_attention` was told, if it was: where pages are is not
                looked at.
        """
        ...

    def causal_conv(
        self,
        rows_TR: Tensor,
        weight_WE: Prepared,
        bias_E: Prepared | None,
        window: StateSlots,
        *,
        activation: bool = True,
    ) -> Tensor:
        """Causal depthwise convolution over the first E elements of each row, then silu unless `activation` is off: (T,
        E).

        `window` is (W - 1, E), the rows before; W >= 2. Tap W - 1 meets the newest row, as in causal-conv1d.
        """
        ...

    def rms_norm(
        self, x_TE: Tensor, weight_E: Prepared | None, eps: float, *, n_groups: int = 1, gate_TE: Tensor | None = None
    ) -> Tensor:
        """z / sqrt(mean(z^2) + eps) * weight with z = x gate, the mean over each of `n_groups` equal parts of a row:
        (T, E) as x.

        Computed in float32 (Zhang & Sennrich 2019). The same bits wherever a row stands.
        """
        ...

    def softplus(self, x_TH: Tensor, bias_H: Prepared) -> Tensor:
        """log(1 + exp(x + bias)): (T, H), float32. The same bits wherever a row stands, unlike torch's."""
        ...

    def selective_scan(
        self,
        x_TE: Tensor,
        dt_TE: Tensor,
        dt_bias_E: Prepared,
        b_TN: Tensor,
        c_TN: Tensor,
        a_NE: Prepared,
        d_E: Prepared,
        state: StateSlots,
    ) -> Tensor:
        """dt = softplus(dt + bias);  h = exp(dt A) h + dt B x;  y = C h + D x: (T, E), float32. `state` is h, (N, E).

        Gu & Dao 2023, Alg. 2.
        """
        ...

    def matrix_scan(
        self, q_TGN: Tensor, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, erase: Erase | None, state: StateSlots, *,
        strength_TH: Tensor | None = None, skip_H: Prepared | None = None,
    ) -> Tensor:  # fmt: skip
        """A state of one matrix a head, written by outer products: (T, H, V), float32. `state` is S, (H, V, N).

            S = S diag(w) + (S a) b^T + strength v k^T      w = exp(log_decay)      y = S q + skip v

        Query and key of group h // (H / G) serve head h. Covers linear attention with decay, SSD (Dao & Gu 2024), the
        delta rules (Yang et al. 2024) and RWKV-7 (Peng et al. 2025).

        Args:
            log_decay: (T, H), or (T, H, N) for one decay a column.
            erase: a and b, or None for none.
            strength_TH, skip_H: None for 1 and for 0.
        """
        ...

    def linear_scan(self, x_TE: Tensor, decay_TE: Tensor, state: StateSlots) -> Tensor:
        """h = decay h + x, y = h: (T, E), float32. `state` is h, (E,)."""
        ...

    def wkv4(
        self, k_TE: Tensor, v_TE: Tensor, decay_E: Prepared, first_E: Prepared, states: tuple[StateSlots, ...]
    ) -> Tensor:
        """The average of v so far, weighted by exp(k) and fading, the newest weighted by exp(first + k): (T, E),
        float32.

        `states` are numerator, denominator and the exponent that both are scaled by, (E,) each; `decay` is added to the
        exponent a token. Peng et al. 2023, eq. 16 and appendix D.
        """
        ...
