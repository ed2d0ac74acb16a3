"""Declares the signature that every set of kernels has. `memory.interface` has the legend of shapes.

A "flat" is a view of all bytes of the arena as one dtype. Rows and states are found in it by element offsets. Flats,
offsets and weights are used many times, so `Kernels.prepare` converts them once instead of at each call. Kernels also
take plain tensors.

A segment consists of the rows of one request, or of one sequence, in a call. The code also calls it a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.staging import Placed
from hybridmem.memory.quantization import Storage

Prepared = Any
"""A tensor, or what `Kernels.prepare` returned for it."""

_OF_BITS = {np.dtype(np.uint16): torch.bfloat16, np.dtype(np.int16): torch.float16}
"""The CPU's kernels hold 16-bit floats in arrays of integers. This maps the arrays' dtypes to those of the floats."""


def as_tensor(x: Prepared) -> Tensor:
    """Return the tensor behind prepared data: `x` itself, or a tensor that shares its bytes."""
    if isinstance(x, Tensor):
        return x
    tensor = torch.from_numpy(x)
    return tensor.view(_OF_BITS[x.dtype]) if x.dtype in _OF_BITS else tensor


@dataclass(eq=False)
class PagedBatch:
    """Holds lengths and pages of the requests of a step, for attention. It is the same for all layers.

    A page holds `page_tokens` rows head by head, (G, page_tokens, D): row r of head g begins (g page_tokens + r) D
    elements after the beginning of the page.

    Attributes:
        cu_seqlens: (S + 1,) request i owns queries [cu_seqlens[i], cu_seqlens[i + 1]); on the host. Short requests come
            first.
        kv_lengths: (S,) how many rows each request sees, its new ones included; on the host.
        pages: (all pages,) element offset of each page, request after request; or (G, all pages) if each key/value head
            reads other pages.
        cu_pages: (S + 1,) request i has pages [cu_pages[i], cu_pages[i + 1]); on the host.
        page_tokens: how many rows a page has.
        layouts: a cache of results that kernels have computed from these arrays. Each kernel uses keys of its own.
    """

    cu_seqlens: Int64s
    kv_lengths: Int64s
    pages: Prepared
    cu_pages: Int64s
    page_tokens: int
    layouts: dict[object, Any] = field(default_factory=dict, compare=False, repr=False, init=False)

    def first(self, n: int) -> PagedBatch:
        """Return a batch of the first n requests alone."""
        return replace(self, cu_seqlens=self.cu_seqlens[: n + 1], kv_lengths=self.kv_lengths[:n])

    def only(self, i: int) -> PagedBatch:
        """Return a batch of one request alone, whose queries are the first ones."""
        cu_seqlens = self.cu_seqlens[i : i + 2] - self.cu_seqlens[i]
        return replace(
            self, cu_seqlens=cu_seqlens, kv_lengths=self.kv_lengths[i : i + 1], cu_pages=self.cu_pages[i : i + 2]
        )

    def at(self, pages: Prepared) -> PagedBatch:
        """Return this batch with other page offsets. `layouts` stays, because it does not depend on these offsets."""
        moved = replace(self, pages=pages)
        moved.layouts.update(self.layouts)
        return moved


@dataclass(frozen=True)
class PageChoice:
    """Holds the pages from which queries choose those that they read. It is the same for all layers.

    Attributes:
        pages: (all pages,) element offset of each page that has rows up to its query, query after query.
        cu_pages: (Q + 1,) query i chooses from pages [cu_pages[i], cu_pages[i + 1]); on the host.
        n_first, n_last: how many pages are chosen whatever their scores: the first n_first pages, and for each query
            the last n_last (Q,); on the host.
        cu_chosen: (Q + 1,) query i chooses cu_chosen[i + 1] - cu_chosen[i] pages: at least n_first + n_last[i], or all
            if there are fewer; on the host.
        layouts: a cache of results that kernels have computed from these arrays. Each kernel uses keys of its own.
    """

    pages: Prepared
    cu_pages: Int64s
    n_first: int
    n_last: Int64s
    cu_chosen: Int64s
    layouts: dict[object, Any] = field(default_factory=dict, compare=False, repr=False, init=False)


class TreePaths(NamedTuple):
    """Says which rows the queries of trees see, in addition to those of their sequences. All arrays are on the host.

    Attributes:
        starts: (S,) request i's tree begins with the request's row starts[i]. Its queries see all rows before.
        rows: the rows on each query's path, oldest first and its own last, query after query; row 0 is the tree's
            first.
        cu_rows: (Q + 1,) query q has rows [cu_rows[q], cu_rows[q + 1]).
    """

    starts: Int64s
    rows: Int64s
    cu_rows: Int64s


class Scoring(NamedTuple):
    """Says how a layer computes weights from queries and keys, as the softmax of scores s = scale q . k.

    A row whose score is -inf has no weight. A query whose scores are all -inf gets NaN (0 / 0), or zeros if there is a
    sink.

    Attributes:
        scale: the factor on products of queries and keys.
        window: how many rows a query sees, of which the newest is its own; None for all.
        softcap: scores become cap tanh(s / cap) (Gemma Team 2024, "Gemma 2"); None for no cap.
        sinks_H: for each query head, the score of an additional row that has no value but takes its share of the weight
            ("learned sinks", Xiao et al. 2023, as in gpt-oss); None for none.
        bias_HL: (H, L) float32, or (queries, H, L) where each query has its own. Column min(d, L - 1) is added to the
            score of a row that is d positions before the query (Raffel et al. 2020, "T5"); None for none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Prepared | None = None
    bias_HL: Prepared | None = None

    def of(self, queries: slice | Tensor | None) -> Scoring:
        """Return the scoring of some of the queries; None stands for all."""
        if queries is None or self.bias_HL is None or self.bias_HL.ndim == 2:
            return self
        return self._replace(bias_HL=self.bias_HL[queries])


@dataclass(frozen=True)
class FoldedRows:
    """Holds those rows of an attention layer that a storage keeps, for all requests of a step. Newer rows are in pages.

    Attributes:
        storage: the storage that decodes the rows.
        shapes: the shapes of the parts of a block: those of the keys, then as many for the values. A block has n_rows
            rows, of which some may be unused.
        flats: for each part, the arena viewed as the part's dtype, beginning at the part's place in a block.
        blocks: (all blocks,) byte address of each block, request after request; or (G, all blocks) if each key/value
            head reads other blocks. On the device.
        cu_blocks: (S + 1,) request i has blocks [cu_blocks[i], cu_blocks[i + 1]); on the host.
        lengths: (S,) how many folded rows each request has; on the host.
        head_dim: how many channels a row has.
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
    """Holds the tails of S segments, in rings: the tokens after their source states and before their rows.

    A ring keeps what each token changes in a state, so that a step need not write states. Positions of segment i count
    from its source state on. The ring has tokens [0, counts[i]), and the segment's own rows follow. Position p is in
    slot (firsts[i] + p) % ring_rows.

    Attributes:
        flats: for each ring, the arena viewed as the ring's dtype, beginning at the ring's place in a block. All rings
            of a block have the same number of slots.
        sources, targets: for each ring, (S,) element offsets of the blocks to read and to write. They may be the same
            if no new token needs the slot of an old one. The changes of a matrix state are written, at least those
            after the fold. Rings of rows are only read.
        firsts, counts: (S,) the slot of position 0, and the number of the tail's tokens.
        folds: (S,) the state that is written to a target of `StateSlots` is the one before position folds[i], which is
            at most the segment's end.
    """

    flats: tuple[Prepared, ...]
    sources: tuple[Prepared, ...]
    targets: tuple[Prepared, ...]
    ring_rows: int
    firsts: Prepared
    counts: Prepared
    folds: Prepared


class StateSlots(NamedTuple):
    """Says where one state tensor of S segments is read, and where it is written.

    Attributes:
        cu_rows: (S + 1,) segment i covers rows [cu_rows[i], cu_rows[i + 1]).
        flat: the arena.
        sources, targets: (S,) element offsets. A source of -1 is a state full of `initial`.
        shape: shape of one state.
        tail: the tokens between the source states and the segments; None for none. With a tail, a target of -1 is not
            written.
    """

    cu_rows: Placed
    flat: Prepared
    sources: Prepared
    targets: Prepared
    shape: tuple[int, ...]
    initial: float
    tail: Tail | None = None


class Erase(NamedTuple):
    """Holds a and b of the term (S a) b^T in `Kernels.matrix_scan`.

    Attributes:
        a: (T, G, N), which the heads of a group share.
        b: (T, H, N). None means -strength k, as in the delta rule.
        after_decay: True if a is applied to S diag(w) instead of S.
    """

    a: Tensor
    b: Tensor | None
    after_decay: bool


class Kernels(Protocol):
    """Declares the functions that read and write the arena's bytes. All sets of kernels must agree with `reference`."""

    def prepare(self, tensor: Tensor) -> Prepared:
        """Return the tensor in the form that these kernels take. It shares memory with the original."""
        ...

    def write_rows_(self, flat: Prepared, offsets_T: Prepared, rows_TR: Tensor) -> None:
        """Write rows into the arena: flat[offsets[t] : offsets[t] + R] = rows[t].

        The written ranges must not overlap.
        """
        ...

    def read_rows(self, flat: Prepared, offsets_T: Prepared, shape: tuple[int, ...], initial: float) -> Tensor:
        """Read the elements from each offset on: (T, *shape). An offset of -1 gives `initial`."""
        ...

    def plan_attention(
        self, batch: PagedBatch, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device,
        window: int | None, folded: FoldedRows | None = None,
    ) -> None:  # fmt: skip
        """Prepare `paged_attention` for this batch, so that its arrays are uploaded together with the step's plan.

        Args:
            heads: the number of query heads, of key/value heads, and of channels per head.
        """
        ...

    def paged_attention(
        self, q_THD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, n_kv_heads: int, scoring: Scoring,
        folded: FoldedRows | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute causal grouped-query attention over pages: (T, H, D).
        The last query of a request sees all rows of the request, or the last `window`.

        The `folded` rows come before those in pages, and every query sees them. Then there is no window.
        """
        ...

    def tree_attention(
        self, q_QHD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, paths: TreePaths, n_kv_heads: int,
        scoring: Scoring,
    ) -> Tensor:  # fmt: skip
        """Compute attention of requests whose queries are trees: (Q, H, D).
        A query sees its request's rows before the tree, and those on its path, or the last `window` of both.

        Distances of a bias count along the path. `batch` has only these requests, with one row for each query.
        """
        ...

    def plan_choice(self, choice: PageChoice, device: torch.device) -> None:
        """Prepare `choose_pages` for this choice, so that its arrays are uploaded together with the step's plan."""
        ...

    def choose_pages(
        self, q_QHD: Tensor, least: Prepared, greatest: Prepared, choice: PageChoice, n_kv_heads: int
    ) -> Tensor:
        """Choose the pages that each key/value head reads. Return their element offsets, (G, all chosen).

        The pages are in order of queries, and for each query the oldest comes first. A page's score is the highest
        score that any query head of the group could give to a key between the page's bounds, which are the (G, D)
        elements of `least` and of `greatest` from the page's offset on: max_s sum_d max(q_sd least_d, q_sd greatest_d).
        Of pages with equal scores, the oldest is chosen first. A page whose score is NaN comes before all others (Tang
        et al. 2024, "Quest", Alg. 1).
        """
        ...

    def choose_rows(
        self, q_THD: Tensor, weights_TH: Tensor, keys: Prepared, batch: PagedBatch, n_chosen: int, scale: float,
        span_tokens: int = 1,
    ) -> Tensor:  # fmt: skip
        """Choose the rows that each query of an index reads: their positions, (all chosen,), query after query.

        A query chooses `n_chosen` of the rows up to itself, or all if these are fewer, and they are in order. The score
        of a row is sum_h weights_h relu(scale q_h . key), and its key is read at its place in the pages, which have one
        head. Among equal rows the older is chosen, and one whose score is NaN before all others (DeepSeek-AI 2025,
        "DeepSeek-V3.2").

        With span_tokens above 1, a key stands for so many consecutive rows. Lengths count rows, pages hold keys, and a
        query chooses among the keys of those whole spans that end before it or with it. Numbers of spans are returned.
        """
        ...

    def attend_rows(
        self, q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, scoring: Scoring, batch: PagedBatch | None = None
    ) -> Tensor:
        """Compute `paged_attention` for one request whose rows are given as tensors, with R >= T: (T, H, D).

        Args:
            batch: if `plan_attention` was called for this request, the batch that it was given, with one page for each
                row. Its page offsets are not read.
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
        """Compute a causal depthwise convolution over the first E elements of each row, and then silu: (T, E).

        There is no silu if `activation` is off. `window` is (W - 1, E), the rows before; W >= 2. Tap W - 1 is for the
        newest row, as in causal-conv1d.
        """
        ...

    def rms_norm(
        self, x_TE: Tensor, weight_E: Prepared | None, eps: float, *, n_groups: int = 1, gate_TE: Tensor | None = None
    ) -> Tensor:
        """Normalize rows: z / sqrt(mean(z^2) + eps) * weight with z = x gate. The result is (T, E), like x.

        The mean is over each of `n_groups` equal parts of a row. It is computed in float32 (Zhang & Sennrich 2019). A
        row gives the same bits at any place in a batch.
        """
        ...

    def softplus(self, x_TH: Tensor, bias_H: Prepared) -> Tensor:
        """Compute log(1 + exp(x + bias)): (T, H), float32.

        A row gives the same bits at any place, unlike torch's softplus.
        """
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
        """Compute the selective scan of Mamba-1 (Gu & Dao 2023, Alg. 2): y (T, E), float32. `state` is h, (N, E).

        dt = softplus(dt + bias);  h = exp(dt A) h + dt B x;  y = C h + D x
        """
        ...

    def matrix_scan(
        self, q_TGN: Tensor, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, erase: Erase | None, state: StateSlots, *,
        strength_TH: Tensor | None = None, skip_H: Prepared | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute a recurrence with one matrix per head as its state: y (T, H, V), float32. `state` is S, (H, V, N).

            S = S diag(w) + (S a) b^T + strength v k^T      w = exp(log_decay)      y = S q + skip v

        Query and key of group h // (H / G) serve head h. The formula covers linear attention with decay, SSD (Dao & Gu
        2024), the delta rules (Yang et al. 2024) and RWKV-7 (Peng et al. 2025).

        Args:
            log_decay: (T, H), or (T, H, N) for one decay per column.
            erase: a and b, or None if nothing is erased.
            strength_TH, skip_H: None stands for a strength of 1 and a skip of 0.
        """
        ...

    def linear_scan(self, x_TE: Tensor, decay_TE: Tensor, state: StateSlots) -> Tensor:
        """Compute h = decay h + x, y = h: (T, E), float32. `state` is h, (E,)."""
        ...

    def wkv4(
        self, k_TE: Tensor, v_TE: Tensor, decay_E: Prepared, first_E: Prepared, states: tuple[StateSlots, ...]
    ) -> Tensor:
        """Compute RWKV-4's decaying average of v: (T, E), float32.

        Weights are exp(k), for the newest token exp(first + k).

        `states` are the numerator, the denominator and the exponent by which both are scaled, (E,) each. `decay` is
        added to the exponent at each token. Source: Peng et al. 2023, eq. 16 and appendix D.
        """
        ...

    def stabilise(self, gate_TH: Tensor, log_decay_TH: Tensor, state: StateSlots) -> Tensor:
        """Scale a sum of exp(gate) that decays so that it stays in range: (3, T, H), float32. `state` is m, (H,).

        With m' = max(log_decay + m, gate), the sum is stored times exp(-m'). Returns the logarithm of the stored sum's
        decay, log_decay + m - m'; the factor of what is added to it, exp(gate - m'); and exp(-m'). Beck et al. 2024,
        "xLSTM", eq. 15 to 17. The ring of a tail holds m' of each token.
        """
        ...
