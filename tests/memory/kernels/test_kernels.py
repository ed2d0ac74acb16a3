"""Every kernel is compared with its twin in plain torch, and the twin with torch and transformers, on awkward shapes.

Blocks are shuffled and apart in an arena full of NaN. A wrong read gives NaN, and a wrong write changes a byte that is
compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import njit
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from hybridmem.memory import RecurrentSpec, SpecError, States, StateTensor
from hybridmem.memory.blocks.staging import Placed, place
from hybridmem.memory.kernels import (
    Kernels,
    PagedBatch,
    Scoring,
    StateSlots,
    blocked,
    chosen_kernels,
    cpu,
    reference,
    select_kernels,
)
from hybridmem.memory.kernels.cpu import attention
from hybridmem.memory.kernels.cpu.vector_math import exp2_f32, exp_f32, softplus_f32
from hybridmem.memory.recurrences import Fold
from hybridmem.memory.state.access import Segments
from tests.extent import few_cases, one_in, only_in_long
from tests.subjects import IS_FULL
from tests.tolerances import assert_kernel_close

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65)
HISTORIES = (0, 3, 130, 0, 1, 40, 0, 16)
"""Rows that requests of these lengths hold already."""
CHANNELS = (1, 24, 128, 130, 200)
BFLOAT16 = torch.bfloat16
in_sixteen_bits = pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        pytest.param(reference, BFLOAT16, id="reference"),
        pytest.param(cpu, BFLOAT16, id="bfloat16"),
        *([pytest.param(cpu, torch.float16, id="float16")] if IS_FULL else []),
    ],
)
"""Kernels treat both dtypes alike but for reading and writing a number, which `test_numbers` tests for each of both."""


def cumulate(counts: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def on_host(array: np.ndarray) -> Placed:
    return place(array, torch.device("cpu"))


def poisoned(n_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return bytes as the arena poisons them: all bits are set."""
    return torch.full((n_elements * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)


def shuffled_offsets(n_blocks: int, block: int) -> list[int]:
    """Return offsets of blocks in any order, with gaps, none at 0.

    They end before (2 * n_blocks + 1) * block.
    """
    return ((2 * torch.randperm(n_blocks) + 1) * block).tolist()


def assert_only_changed(flat: Tensor, before: Tensor, offsets: list[int], n_elements: int) -> None:
    """Assert that all bytes of `flat` outside of the given blocks are as they were, NaN or not."""
    changed = torch.zeros(len(flat), dtype=torch.bool)
    for offset in offsets:
        changed[offset : offset + n_elements] = True
    bits = torch.int32 if flat.dtype == torch.float32 else torch.int16
    assert torch.equal(flat.view(bits)[~changed], before.view(bits)[~changed]), (
        "bytes outside of the targets were written"
    )


# The tests below are about rows.


@pytest.mark.parametrize("n_elements", [1, 7, 64])
@pytest.mark.parametrize("kernels", [cpu, reference])
def test_rows_are_written_where_they_belong_and_nowhere_else(kernels: Kernels, n_elements: int) -> None:
    offsets, rows = shuffled_offsets(9, n_elements), torch.randn(n_elements, 9).T
    flat = poisoned(20 * n_elements)
    before = flat.clone()
    kernels.write_rows_(flat, torch.tensor(offsets), rows)
    for offset, row in zip(offsets, rows, strict=True):
        assert torch.equal(flat[offset : offset + n_elements], row)
    assert_only_changed(flat, before, offsets, n_elements)


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_writing_no_rows_writes_nothing(kernels: Kernels) -> None:
    flat = poisoned(8)
    kernels.write_rows_(flat, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))
    assert flat.isnan().all()


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_rows_are_read_in_any_order_and_from_nowhere_as_initial(kernels: Kernels) -> None:
    flat = torch.arange(40.0)
    rows = kernels.read_rows(flat, torch.tensor([30, -1, 0, 30, 12]), (2, 3), initial=-3.5)
    expected = [torch.full((6,), -3.5) if start < 0 else flat[start : start + 6] for start in (30, -1, 0, 30, 12)]
    assert torch.equal(rows, torch.stack(expected).reshape(5, 2, 3))
    rows.zero_()
    assert torch.equal(flat, torch.arange(40.0)), "the rows are no copy"


# The tests below are about attention.


class Pages:
    """Holds keys and values of several requests, in pages of an arena and as plain tensors."""

    def __init__(
        self, n_heads: int, n_kv_heads: int, head_dim: int, page_tokens: int, lengths: tuple[int, ...] = LENGTHS,
        histories: tuple[int, ...] = HISTORIES, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.n_kv_heads, self.scale = n_kv_heads, 1.3 / math.sqrt(head_dim)
        self.n_groups = n_heads // n_kv_heads
        self.softcap: float | None = None
        self.sinks: Tensor | None = None
        self.bias: Tensor | None = None
        self.q = torch.randn(sum(lengths), n_heads, head_dim).to(dtype)
        kv_lengths = np.add(lengths, histories)
        self.rows = [torch.randn(2, n, n_kv_heads, head_dim).to(dtype) for n in kv_lengths.tolist()]
        page = page_tokens * n_kv_heads * head_dim
        n_pages = -(-kv_lengths // page_tokens)
        offsets = shuffled_offsets(int(n_pages.sum()), 2 * page)
        arena = poisoned((2 * len(offsets) + 1) * 2 * page, dtype)
        table = torch.tensor(offsets)
        for i, kv in enumerate(self.rows):
            for p in range(n_pages[i]):
                start = offsets.pop(0)
                for half, rows in enumerate(kv[:, p * page_tokens : (p + 1) * page_tokens]):
                    own = arena[start + half * page : start + (half + 1) * page].view(n_kv_heads, page_tokens, head_dim)
                    own[:, : len(rows)] = rows.transpose(0, 1)
        self.arena, self.values_at = arena, page
        self.batch = PagedBatch(cumulate(lengths), kv_lengths, table, cumulate(n_pages), page_tokens)

    def attend(self, kernels: Kernels, only: int | None = None, window: int | None = None) -> Tensor:
        """Return outputs of all requests, or of one of them alone."""
        q, batch = self.q, self.batch
        if only is not None:
            start, end = batch.cu_seqlens[only : only + 2].tolist()
            q = q[start:end]
            pages = batch.pages[slice(*batch.cu_pages[only : only + 2].tolist())]
            batch = PagedBatch(
                cumulate((end - start,)), batch.kv_lengths[only:][:1], pages, cumulate((len(pages),)), batch.page_tokens
            )
        scoring = Scoring(self.scale, window, self.softcap, self.sinks, self.bias)
        return kernels.paged_attention(q, self.arena, self.arena[self.values_at :], batch, self.n_kv_heads, scoring)

    def expected(self, window: int = 1 << 30) -> Tensor:
        """Return the outputs of torch's own attention with an explicit mask.

        Query j of n sees rows up to n_rows - n + j, and at most `window` of them.
        """
        outputs = []
        for i, (k, v) in enumerate(self.rows):
            start, end = self.batch.cu_seqlens[i : i + 2].tolist()
            newest = torch.arange(len(k) - (end - start), len(k))[:, None]
            mask = (torch.arange(len(k)) <= newest) & (torch.arange(len(k)) > newest - window)
            k, v = (t.repeat_interleave(self.n_groups, dim=1).transpose(0, 1) for t in (k, v))
            q = self.q[start:end].transpose(0, 1)
            outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale).transpose(0, 1))
        return torch.cat(outputs)


@few_cases
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("head_dim, n_kv_heads", [(8, 2), (20, 1), (64, 3)])
@pytest.mark.parametrize("n_groups", [1, 3, 7])
def test_attention_over_pages_is_plain_attention(
    n_groups: int, head_dim: int, n_kv_heads: int, page_tokens: int
) -> None:
    pages = Pages(n_groups * n_kv_heads, n_kv_heads, head_dim, page_tokens)
    before, expected = pages.arena.clone(), pages.expected()
    assert_kernel_close(pages.attend(reference), expected)
    assert_kernel_close(pages.attend(cpu), pages.attend(reference))
    assert_only_changed(pages.arena, before, [], 0)


@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 100, 1000])
def test_attention_over_a_window_is_masked_attention(window: int) -> None:
    pages = Pages(6, 2, 8, page_tokens=4)
    expected = pages.expected(window)
    assert_kernel_close(pages.attend(reference, window=window), expected)
    assert_kernel_close(pages.attend(cpu, window=window), expected)


@pytest.mark.parametrize("window", [1 << 30, 20])
@pytest.mark.parametrize(
    "softcap, has_sinks, n_distances", [(0.7, False, 0), (None, True, 0), (2.0, True, 30), (None, False, 1000)]
)
def test_capped_scores_sinks_and_biases(softcap: float | None, has_sinks: bool, n_distances: int, window: int) -> None:
    """By definition, scores are capped, get a bias by distance, and have one more column without a value."""
    pages = Pages(6, 2, 8, page_tokens=4)
    pages.softcap, pages.sinks = softcap, torch.randn(6) if has_sinks else None
    pages.bias = torch.randn(6, n_distances) if n_distances else None
    outputs = []
    for i, (k, v) in enumerate(pages.rows):
        start, end = pages.batch.cu_seqlens[i : i + 2].tolist()
        k, v = (t.repeat_interleave(3, dim=1).transpose(0, 1) for t in (k, v))
        scores = pages.q[start:end].transpose(0, 1) @ k.transpose(1, 2) * pages.scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        newest = torch.arange(k.shape[1] - (end - start), k.shape[1])[:, None]
        if pages.bias is not None:
            scores = scores + pages.bias[:, (newest - torch.arange(k.shape[1])).clamp(0, n_distances - 1)]
        hidden = (torch.arange(k.shape[1]) > newest) | (torch.arange(k.shape[1]) <= newest - window)
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + (0 if pages.sinks is None else pages.sinks.exp()[:, None, None])
        outputs.append((weights / total @ v).transpose(0, 1))
    expected = torch.cat(outputs)
    for kernels in (reference, cpu):
        assert_kernel_close(pages.attend(kernels, window=window), expected)
    for i in range(len(LENGTHS)):  # Heads of a request that runs alone are divided among tasks.
        start, end = pages.batch.cu_seqlens[i : i + 2].tolist()
        assert_kernel_close(pages.attend(cpu, only=i, window=window), expected[start:end])


@pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("n_distances", [1, 9, 200])
def test_each_query_may_have_its_own_bias(kernels: Kernels, n_distances: int) -> None:
    """A query gets the same as if all queries had its bias, in requests of few queries and of many."""
    pages = Pages(6, 2, 20, page_tokens=4, lengths=(1, 3, 40), histories=(130, 0, 70))
    biases = torch.randn(len(pages.q), 6, n_distances)
    pages.bias = biases
    found = pages.attend(kernels)
    for t in (0, 1, 3, 4, 17, len(pages.q) - 1):
        pages.bias = biases[t]
        assert_kernel_close(found[t], pages.attend(reference)[t])


def test_rows_before_the_window_are_not_read() -> None:
    """Everything before the last window of the longest history is NaN, so any read would show."""
    pages = Pages(6, 2, 8, page_tokens=4, lengths=(1, 20), histories=(130, 130))
    row, window = 2 * 8, 24
    for i in range(2):
        n_hidden = (130 + 1 - window) // 4
        for page in pages.batch.pages[pages.batch.cu_pages[i] :][:n_hidden].tolist():
            pages.arena[page : page + 4 * row] = torch.nan
            pages.arena[pages.values_at + page : pages.values_at + page + 4 * row] = torch.nan
    for kernels in (cpu, reference):
        assert pages.attend(kernels, window=window).isfinite().all()


class Largest(TorchDispatchMode):
    """Tells how many bytes the largest tensor has that was made."""

    n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.n_bytes = max(self.n_bytes, x.untyped_storage().nbytes())
        return out


@few_cases
@pytest.mark.parametrize("window", [None, 700], ids=["", "window"])
@pytest.mark.parametrize("softcap", [None, 0.7], ids=["", "capped"])
@pytest.mark.parametrize(
    "kernels, dtype",
    [(cpu, torch.float32), (cpu, BFLOAT16), (reference, BFLOAT16)],
    ids=["cpu", "cpu in bfloat16", "reference"],
)
def test_attention_needs_no_more_bytes_the_more_rows_there_are(
    kernels: Kernels, dtype: torch.dtype, softcap: float | None, window: int | None
) -> None:
    """Neither old rows nor queries need more bytes than inputs and outputs have."""
    for lengths, histories in (((100,), (30_000,)), ((3_000,), (0,))):
        pages = Pages(2, 1, 2, 64, lengths, histories, dtype)
        pages.softcap = softcap
        largest = Largest()
        with largest:
            pages.attend(kernels, window=window)
        # A mask of all rows has 12 MB or 36 MB, and so have the scores of each head.
        assert largest.n_bytes <= 8 << 20


@few_cases
@pytest.mark.parametrize("window", [None, 5, 100, 1_500], ids=str)
@pytest.mark.parametrize("kernels", [cpu, reference])
def test_attention_in_blocks_is_attention(
    kernels: Kernels, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of queries and of rows may have any size."""
    pages = Pages(6, 2, 8, 4, lengths=(17, 60, 130), histories=(1_200, 0, 1_100))
    whole = pages.expected(window or 1 << 30)
    for queries, rows in ((1024, 1024), (16, 16), (32, 100)):
        monkeypatch.setattr(attention, "_MOST_QUERIES", queries)
        monkeypatch.setattr(attention, "_ROWS", rows)
        monkeypatch.setattr(blocked, "_ROWS", rows)
        assert_kernel_close(pages.attend(kernels, window=window), whole)


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_a_block_of_rows_that_all_score_minus_infinity_has_no_weight(kernels: Kernels) -> None:
    pages = Pages(2, 1, 1, 4, lengths=(20,), histories=(2_500,))
    pages.q.abs_()
    pages.rows[0][0, :2_200] = -torch.inf
    for page in pages.batch.pages[:550].tolist():
        pages.arena[page : page + 4] = -torch.inf
    assert_kernel_close(pages.attend(kernels), pages.expected())


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_a_query_of_which_all_scores_are_minus_infinity_has_no_result(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is so however many queries there are, and whichever kernel attends from them."""
    pages = Pages(2, 1, 1, 4, lengths=(3, 40), histories=(0, 0))
    pages.q.abs_()
    for page in pages.batch.pages.tolist():
        pages.arena[page : page + pages.values_at] = -torch.inf
    for few, most in ((0, 0), (0, 512), (64, 512)):
        monkeypatch.setattr(attention, "_FEW_QUERIES", few)
        monkeypatch.setattr(attention, "_MOST_IN_PLACE", most)
        assert pages.attend(kernels).isnan().all()


def test_attention_is_the_same_bits_alone_and_among_others() -> None:
    pages = Pages(n_heads=6, n_kv_heads=2, head_dim=20, page_tokens=4)
    together = pages.attend(cpu)
    for i in range(len(LENGTHS)):
        start, end = pages.batch.cu_seqlens[i : i + 2].tolist()
        assert torch.equal(pages.attend(cpu, only=i), together[start:end])


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_attention_takes_queries_that_are_a_view(kernels: Kernels) -> None:
    pages = Pages(n_heads=2, n_kv_heads=1, head_dim=8, page_tokens=4)
    expected = pages.attend(kernels)
    pages.q = pages.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(pages.attend(kernels), expected)


def test_attention_survives_scores_far_apart() -> None:
    """Scores are thousands apart. They are whole numbers, so that no rounding decides between them."""
    pages = Pages(n_heads=2, n_kv_heads=1, head_dim=8, page_tokens=4)
    pages.q, pages.arena, pages.rows = (
        pages.q.round() * 1000,
        pages.arena.round(),
        [rows.round() for rows in pages.rows],
    )
    pages.scale = 1.0
    assert_kernel_close(pages.attend(reference), pages.expected())
    assert_kernel_close(pages.attend(cpu), pages.expected())


@pytest.mark.parametrize("half", ["keys", "values"])
@pytest.mark.parametrize("kernels", [cpu, reference])
@pytest.mark.parametrize("n_queries", [1, 40])
def test_a_nan_that_attention_may_read_shows(kernels: Kernels, half: str, n_queries: int) -> None:
    pages = Pages(2, 1, 8, page_tokens=4, lengths=(n_queries,), histories=(9,))
    pages.arena[int(pages.batch.pages[1]) + (pages.values_at if half == "values" else 0)] = torch.nan
    assert pages.attend(kernels).flatten(1).isnan().any(1).all()


@in_sixteen_bits
@pytest.mark.parametrize("lengths", [(1, 3, 1), (40, 2)], ids=["few queries", "many"])
@pytest.mark.parametrize("head_dim", [20, 32])
def test_attention_in_16_bits_is_close_to_float32(
    kernels: Kernels, dtype: torch.dtype, head_dim: int, lengths: tuple[int, ...]
) -> None:
    pages = Pages(6, 2, head_dim, page_tokens=4, lengths=lengths, histories=(9,) * len(lengths), dtype=dtype)
    actual = pages.attend(kernels)
    pages.q, pages.rows = pages.q.float(), [rows.float() for rows in pages.rows]
    assert actual.dtype == dtype
    assert_kernel_close(actual, pages.expected(), BFLOAT16)


# The tests below are about recurrences.


class Slots:
    """Holds states of several segments in an arena.

    A state is new, stays in place, moves from one block to another, or is read by two segments.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        lengths: tuple[int, ...] = LENGTHS,
        dtype: torch.dtype = torch.float32,
        initial: float = 0.0,
    ) -> None:
        self.n_elements, self.lengths = math.prod(shape), lengths
        blocks = shuffled_offsets(2 * len(lengths), self.n_elements)
        self.targets, others = blocks[: len(lengths)], blocks[len(lengths) :]
        choices = zip(self.targets, others, strict=True)
        self.sources = [(-1, target, other, others[-1])[i % 4] for i, (target, other) in enumerate(choices)]
        self.before = poisoned((2 * len(blocks) + 1) * self.n_elements, dtype)
        for source in set(self.sources) - {-1}:
            self.before[source : source + self.n_elements] = torch.randn(self.n_elements).to(dtype)
        self.shape, self.initial = shape, initial
        self.flat = self.before.clone()

    def fresh(self, only: int | None = None) -> StateSlots:
        """Return the arena as it was in the beginning, with all segments or one of them alone."""
        self.flat = self.before.clone()
        chosen = slice(None) if only is None else slice(only, only + 1)
        sources, targets = (torch.tensor(offsets[chosen]) for offsets in (self.sources, self.targets))
        return StateSlots(
            on_host(cumulate(self.lengths[chosen])), self.flat, sources, targets, self.shape, self.initial
        )

    def start(self, run: int) -> Tensor:
        source = self.sources[run]
        state = (
            self.before[source : source + self.n_elements]
            if source >= 0
            else torch.full((self.n_elements,), self.initial, dtype=self.before.dtype)
        )
        return state.reshape(self.shape)

    def ends(self) -> Tensor:
        """Return (S, *shape): what the targets hold now."""
        return torch.stack([self.flat[target : target + self.n_elements] for target in self.targets]).reshape(
            -1, *self.shape
        )

    def assert_only_targets_changed(self) -> None:
        assert_only_changed(self.flat, self.before, self.targets, self.n_elements)


def make_conv(
    n_channels: int, n_taps: int, *, has_bias: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor | None]:
    bias = torch.randn(n_channels).to(dtype) if has_bias else None
    return torch.randn(sum(LENGTHS), n_channels).to(dtype), torch.randn(n_taps, n_channels).to(dtype), bias


def make_scan(n_channels: int, n_states: int) -> tuple[Tensor, ...]:
    """Return x, dt, dt's bias, B, C, A and D as a trained layer has them, with A < 0."""
    n = sum(LENGTHS)
    x, d = torch.randn(n, n_channels), torch.randn(n_channels)
    b, c = torch.randn(n, n_states), torch.randn(n, n_states)
    return (
        x,
        torch.randn(n, n_channels),
        torch.randn(n_channels) - 1,
        b,
        c,
        -torch.rand(n_states, n_channels).mul(3).exp() / 4,
        d,
    )


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("n_taps", [2, 3, 4])
@pytest.mark.parametrize("n_channels", CHANNELS)
def test_convolution_agrees_with_its_twin(n_channels: int, n_taps: int, has_bias: bool) -> None:
    slots, inputs = Slots((n_taps - 1, n_channels)), make_conv(n_channels, n_taps, has_bias=has_bias)
    expected = reference.causal_conv(*inputs, slots.fresh())
    expected_ends = slots.ends()
    slots.assert_only_targets_changed()
    assert_kernel_close(cpu.causal_conv(*inputs, slots.fresh()), expected)
    assert torch.equal(slots.ends(), expected_ends), "the rows before are copies, to the bit"
    slots.assert_only_targets_changed()


@pytest.mark.parametrize("n_taps", [2, 4])
def test_convolution_is_torchs_own(n_taps: int) -> None:
    slots, (rows, weight, bias) = Slots((n_taps - 1, 24), initial=0.5), make_conv(24, n_taps, has_bias=True)
    actual = torch.split(reference.causal_conv(rows, weight, bias, slots.fresh()), LENGTHS)
    for i, own in enumerate(torch.split(rows, LENGTHS)):
        padded = torch.cat([slots.start(i), own])
        expected = F.silu(F.conv1d(padded.T[None], weight.T[:, None], bias, groups=24)[0].T)
        assert_kernel_close(actual[i], expected)
        assert torch.equal(slots.ends()[i], padded[1 - n_taps :])


@pytest.mark.parametrize("n_states", [1, 5, 16])
@pytest.mark.parametrize("n_channels", CHANNELS)
def test_scan_agrees_with_its_twin(n_channels: int, n_states: int) -> None:
    slots, inputs = Slots((n_states, n_channels)), make_scan(n_channels, n_states)
    expected = reference.selective_scan(*inputs, slots.fresh())
    expected_ends = slots.ends()
    slots.assert_only_targets_changed()
    assert_kernel_close(cpu.selective_scan(*inputs, slots.fresh()), expected)
    assert_kernel_close(slots.ends(), expected_ends)
    slots.assert_only_targets_changed()


def test_scan_is_that_of_transformers() -> None:
    x, dt, bias, b, c, a, d = make_scan(n_channels=24, n_states=5)
    slots = Slots((5, 24))
    slots.sources = [-1] * len(LENGTHS)
    actual = torch.split(reference.selective_scan(x, dt, bias, b, c, a, d, slots.fresh()), LENGTHS)
    dt = F.softplus(dt + bias)
    for i, (x_i, dt_i, b_i, c_i) in enumerate(zip(*(torch.split(t, LENGTHS) for t in (x, dt, b, c)), strict=True)):
        batched = (t.T[None] for t in (x_i, dt_i))
        y, end = mamba_selective_scan(*batched, a.T, b_i.T[None], c_i.T[None], D=d, return_last_state=True)
        assert_kernel_close(actual[i], y[0].T)
        assert_kernel_close(slots.ends()[i], end[0].T)


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_a_state_starts_from_its_initial_value(kernels: Kernels) -> None:
    inputs, written = make_scan(n_channels=24, n_states=5), Slots((5, 24), initial=0.75)
    implied = kernels.selective_scan(*inputs, written.fresh())
    written.before[0:120] = 0.75
    written.sources = [0 if source < 0 else source for source in written.sources]
    assert torch.equal(kernels.selective_scan(*inputs, written.fresh()), implied)


def test_recurrences_are_the_same_bits_alone_and_among_others() -> None:
    x, dt, dt_bias, b, c, a, d = make_scan(n_channels=130, n_states=5)
    states, window = Slots((5, 130)), Slots((3, 130))
    rows, weight, bias = make_conv(130, 4, has_bias=True)
    y, y_ends = cpu.selective_scan(x, dt, dt_bias, b, c, a, d, states.fresh()), states.ends()
    z, z_ends = cpu.causal_conv(rows, weight, bias, window.fresh()), window.ends()
    for i in range(len(LENGTHS)):
        own = slice(*cumulate(LENGTHS)[i : i + 2].tolist())
        assert torch.equal(
            cpu.selective_scan(x[own], dt[own], dt_bias, b[own], c[own], a, d, states.fresh(only=i)), y[own]
        )
        assert torch.equal(states.ends()[i], y_ends[i])
        assert torch.equal(cpu.causal_conv(rows[own], weight, bias, window.fresh(only=i)), z[own])
        assert torch.equal(window.ends()[i], z_ends[i])


def test_threads_change_no_bit() -> None:
    """The suite runs on one thread. Here there is enough work for several threads, which must give the same bits."""
    pages, states, inputs = (
        Pages(n_heads=6, n_kv_heads=2, head_dim=64, page_tokens=16),
        Slots((16, 200)),
        make_scan(200, 16),
    )
    results = []
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        try:
            results.append((pages.attend(cpu), cpu.selective_scan(*inputs, states.fresh()), states.ends()))
        finally:
            torch.set_num_threads(1)
    for one, two in zip(*results, strict=True):
        assert_kernel_close(two, one)
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("at", range(0, 64, 7))
def test_recurrences_may_be_cut_anywhere(at: int) -> None:
    """One segment of 65 rows has the same bits as two segments, one after the other, with the same rows."""
    x, dt, dt_bias, b, c, a, d = (t[:65] if len(t) == sum(LENGTHS) else t for t in make_scan(n_channels=24, n_states=5))
    rows, weight, bias = make_conv(24, 4, has_bias=True)
    cuts = (slice(0, at + 1), slice(at + 1, 65))

    def run(slots: Slots, state: StateSlots, source: int, own: slice) -> StateSlots:
        n_rows = own.stop - own.start
        return StateSlots(
            on_host(cumulate((n_rows,))),
            state.flat,
            torch.tensor([source]),
            torch.tensor([slots.targets[0]]),
            slots.shape,
            0.0,
        )

    states, window = Slots((5, 24), lengths=(65,)), Slots((3, 24), lengths=(65,))
    y, y_end = cpu.selective_scan(x, dt, dt_bias, b, c, a, d, states.fresh()), states.ends()
    z, z_end = cpu.causal_conv(rows[:65], weight, bias, window.fresh()), window.ends()
    state, conv = states.fresh(), window.fresh()
    y_parts, z_parts = [], []
    for own, sources in zip(cuts, ((-1, -1), (states.targets[0], window.targets[0])), strict=True):
        y_parts.append(
            cpu.selective_scan(x[own], dt[own], dt_bias, b[own], c[own], a, d, run(states, state, sources[0], own))
        )
        z_parts.append(cpu.causal_conv(rows[own], weight, bias, run(window, conv, sources[1], own)))
    assert torch.equal(torch.cat(y_parts), y) and torch.equal(states.ends(), y_end)
    assert torch.equal(torch.cat(z_parts), z) and torch.equal(window.ends(), z_end)


@pytest.mark.parametrize("argument", [0, 1, 3, 4])
@pytest.mark.parametrize("kernels", [cpu, reference])
def test_a_nan_that_a_scan_may_read_shows(kernels: Kernels, argument: int) -> None:
    inputs, slots = make_scan(n_channels=3, n_states=2), Slots((2, 3))
    inputs[argument][0] = poisoned(1)
    assert kernels.selective_scan(*inputs, slots.fresh())[0].isnan().all()


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_a_nan_in_a_start_state_shows(kernels: Kernels) -> None:
    slots, conv = Slots((5, 24), initial=torch.nan), Slots((3, 24), initial=torch.nan)
    assert kernels.selective_scan(*make_scan(24, 5), slots.fresh())[0].isnan().all()
    assert kernels.causal_conv(*make_conv(24, 4, has_bias=False), conv.fresh())[0].isnan().all()


@only_in_long
@in_sixteen_bits
@pytest.mark.parametrize("of_states", one_in(2, [torch.float32, BFLOAT16]), ids=str)
def test_scan_in_16_bits_is_close_to_float32(kernels: Kernels, dtype: torch.dtype, of_states: torch.dtype) -> None:
    inputs = [t.to(dtype).float() for t in make_scan(n_channels=24, n_states=16)]
    slots = Slots((16, 24), dtype=of_states)
    actual = kernels.selective_scan(*(t.to(dtype) for t in inputs[:5]), *inputs[5:], slots.fresh())
    ends = slots.ends()
    slots.assert_only_targets_changed()
    slots.before = slots.before.float()
    expected = reference.selective_scan(*inputs, slots.fresh())
    assert actual.dtype == torch.float32 and ends.dtype == of_states
    assert_kernel_close(actual, expected)
    assert_kernel_close(ends, slots.ends().to(of_states), of_states)


@only_in_long
@in_sixteen_bits
@pytest.mark.parametrize("n_channels", [24, 70])
def test_convolution_in_16_bits_is_close_to_float32(kernels: Kernels, dtype: torch.dtype, n_channels: int) -> None:
    slots, inputs = Slots((3, n_channels), dtype=dtype), make_conv(n_channels, 4, has_bias=True, dtype=dtype)
    actual, ends = kernels.causal_conv(*inputs, slots.fresh()), slots.ends()
    slots.assert_only_targets_changed()
    slots.before = slots.before.float()
    expected = reference.causal_conv(*(t.float() for t in inputs if t is not None), slots.fresh())
    assert actual.dtype == ends.dtype == dtype
    assert_kernel_close(actual, expected, BFLOAT16)
    assert torch.equal(ends.float(), slots.ends())


# The tests below run any recurrence.


def blend(states: tuple[Tensor, ...], row: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    total, previous = states
    total = 0.5 * total + row.sum(-1, keepdim=True) * row
    return (total, row[:, None, :2].to(previous.dtype)), total[:, :2] + previous[:, 0].float()


@pytest.mark.parametrize("lengths", [(1,), (3, 3), (5, 1, 9, 1, 2), (1, 2, 3), (3, 2, 1)])
@pytest.mark.parametrize("second_dtype", [torch.float32, BFLOAT16])
def test_a_fold_is_a_loop_over_each_run(lengths: tuple[int, ...], second_dtype: torch.dtype) -> None:
    tensors = StateTensor("total", (3,), initial=-1.5), StateTensor("previous", (1, 2), second_dtype, initial=0.25)
    spec, rows = RecurrentSpec("blend", (3,), tensors), torch.randn(sum(lengths), 3)
    slots = [Slots(t.shape, lengths, t.dtype or torch.float32, t.initial) for t in tensors]
    if second_dtype == torch.float32:  # States of one element size share their offsets.
        slots[0] = Slots((3,), lengths, initial=-1.5)
        slots[1].sources, slots[1].targets, slots[1].before = (
            slots[0].sources,
            slots[0].targets,
            slots[0].before.clone(),
        )
    fresh = [s.fresh() for s in slots]
    sizes = [s.flat.element_size() for s in fresh]
    sources = {size: s.sources for size, s in zip(sizes, fresh, strict=True)}
    targets = {size: s.targets for size, s in zip(sizes, fresh, strict=True)}
    kernels = select_kernels(torch.device("cpu"), torch.float32, second_dtype)
    run = Segments(on_host(cumulate(lengths)), np.zeros(len(lengths), np.int64), sources, targets, None, None)
    states = States(spec, kernels, [s.flat for s in fresh], run)

    outputs, ended = Fold(blend)(states, rows)

    assert ended is states and states.is_written
    actual = torch.split(outputs, lengths)
    for i, own in enumerate(torch.split(rows, lengths)):
        state = tuple(s.start(i)[None].float() for s in slots)
        for t, row in enumerate(own):
            state, y = blend(state, row[None])
            assert_kernel_close(actual[i][t], y[0])
        for s, expected in zip(slots, state, strict=True):
            assert_kernel_close(s.ends()[i].float(), expected[0].to(s.before.dtype).float())


# The tests below are about the choice of kernels, and vector math.


@pytest.mark.parametrize(
    "device, dtypes, expected",
    [
        ("cpu", (torch.float32,), cpu),
        ("cpu", (torch.float32, torch.float32), cpu),
        ("cpu", (torch.bfloat16,), cpu),
        ("cpu", (torch.float32, torch.float16), cpu),
        ("cpu", (torch.float64, torch.float32), reference),
        ("meta", (torch.float32,), reference),
    ],
)
def test_kernels_are_chosen_by_device_and_dtypes(
    device: str, dtypes: tuple[torch.dtype, ...], expected: Kernels
) -> None:
    assert select_kernels(torch.device(device), *dtypes) is expected


def test_the_choice_of_kernels_can_be_overridden_and_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    host, float32 = torch.device("cpu"), torch.float32
    assert set(chosen_kernels(host, float32).values()) == {"cpu"}
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "reference")
    assert select_kernels(host, float32) is reference
    assert chosen_kernels("cpu", float32)["paged_attention"] == "reference"
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "cpu")
    assert select_kernels(host, float32) is cpu
    assert select_kernels(torch.device("meta"), BFLOAT16) is reference, "a dry run computes nothing"


@pytest.mark.parametrize(
    "override, dtype, says",
    [
        ("fast", torch.float32, "'fast' names no kernels; choose reference, cpu, cuda, triton"),
        ("cpu", torch.float64, "cpu cannot work on cpu in float64"),
        ("cuda", torch.float32, "TRITON_INTERPRET=1|needs triton"),
    ],
)
def test_a_choice_that_cannot_work_is_refused(
    override: str, dtype: torch.dtype, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", override)
    with pytest.raises(SpecError, match=says):
        select_kernels(torch.device("cpu"), dtype)


@pytest.mark.parametrize("fastmath", [False, {"reassoc", "contract"}, {"contract", "arcp", "nsz"}])
def test_vector_math_is_as_accurate_as_it_says(fastmath: bool | set[str]) -> None:
    def ulps(
        function: Callable[..., float], x: NDArray[np.float64], exact: Callable[..., NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        @njit(fastmath=fastmath)
        def apply(x, out):
            for i in range(len(x)):
                out[i] = function(x[i])

        x32 = x.astype(np.float32)
        out, expected = np.empty_like(x32), exact(x32.astype(np.float64))
        apply(x32, out)
        return np.abs(out - expected) / np.spacing(np.abs(expected).astype(np.float32))

    near_zero = np.geomspace(1e-12, 1, 20_000)
    x = np.concatenate([np.linspace(-87.3, 88, 1_000_000), near_zero, -near_zero, [0.0]])
    assert ulps(exp2_f32, x * 1.44, np.exp2).max() <= 2
    assert (ulps(exp_f32, x, np.exp) / (1 + np.abs(x))).max() <= 1.5
    assert (
        ulps(softplus_f32, x, lambda v: np.log1p(np.exp(-np.abs(v))) + np.maximum(v, 0)) / (1 + np.maximum(-x, 0))
    ).max() <= 4


def test_exp_outside_of_its_range_stays_positive_and_finite_and_nan_stays_nan() -> None:
    @njit
    def exp_one(x):
        return exp_f32(x)

    low, high, nan, poison = (
        exp_one(x) for x in (*np.float32([-np.inf, np.inf, np.nan]), np.uint32([0xFFFFFFFF]).view(np.float32)[0])
    )
    assert 0 < low < 2e-38
    assert 1e38 < high < np.inf
    assert np.isnan(nan) and np.isnan(poison)
