"""Indexes choose spans of rows. The tests say which rows are read, which keys are kept, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridmem.memory import (
    AttentionSpec,
    ChosenRows,
    DropError,
    HybridMemory,
    IndexSpec,
    MemorySpec,
    Rotation,
    Sequence,
    SpecError,
    StepError,
)
from hybridmem.memory.kernels import Scoring, reference
from hybridmem.memory.rotary import UNROTATED
from tests.tolerances import assert_kernel_close

N_CHOSEN, SPAN, N_TOKENS = 6, 3, 29
INDEX = IndexSpec(2, 4, N_CHOSEN, rotation=UNROTATED, span_tokens=SPAN)
ATTENTION = AttentionSpec(6, 2, 4, n_chosen=N_CHOSEN, rotation=UNROTATED, span_tokens=SPAN)
SPEC = MemorySpec(((ATTENTION, INDEX),), 9)


class Rows:
    """Holds random inputs of a layer for the tokens of one sequence.

    Only the index keys of a span's last token count.
    """

    def __init__(self, seed: int, span: int = SPAN) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = {"q": (6, 4), "k": (2, 4), "v": (2, 4), "index_q": (2, 4), "index_k": (1, 4), "weights": (2,)}
        self.of = {name: torch.randn(N_TOKENS, *size, generator=generator) for name, size in sizes.items()}
        self.of["index_k"][torch.arange(N_TOKENS) % span < span - 1] = torch.nan
        self.span = span

    def __getitem__(self, own: slice) -> dict[str, Tensor]:
        return {name: x[own] for name, x in self.of.items()}

    def expected(self, t: int, n_chosen: int = N_CHOSEN) -> Tensor:
        """Return what token t attends to, computed by loops."""
        n_spans = (t + 1) // self.span
        keys = self.of["index_k"][self.span - 1 :: self.span, 0][:n_spans]
        products = (keys @ self.of["index_q"][t].T * 4**-0.5).clamp(min=0)
        best = (products * self.of["weights"][t]).sum(1).argsort(descending=True, stable=True)[: n_chosen // self.span]
        rows = [r for s in sorted(best.tolist()) for r in range(s * self.span, (s + 1) * self.span)]
        rows += range(n_spans * self.span, t + 1)
        k, v = self.of["k"][rows], self.of["v"][rows]
        return reference.attend_rows(self.of["q"][t : t + 1], k, v, Scoring(0.5))


def memory(spec: MemorySpec = SPEC, **options: Any) -> HybridMemory:
    return HybridMemory(spec, "1MiB", **({"rollback_window": 4, "page_tokens": 4, "poison": True} | options))


def feed(own: HybridMemory, *requests: tuple[Sequence, Rows, int]) -> list[Tensor]:
    """Feed each sequence its rows up to a position."""
    begins = [sequence.length for sequence, _, _ in requests]
    tokens = {s: [1] * (end - begin) for (s, _, end), begin in zip(requests, begins, strict=True)}
    with own.step(tokens, outputs="all") as step:
        # The step packs short requests first.
        order = sorted(range(len(requests)), key=lambda i: requests[i][2] - begins[i])
        inputs = [requests[i][1][begins[i] : requests[i][2]] for i in order]
        rows = {name: torch.cat([x[name] for x in inputs]) for name in inputs[0]}
        chosen = step.choose(0, rows["index_q"], rows["index_k"], rows["weights"])
        y = step.attend(0, rows["q"], rows["k"], rows["v"], chosen=chosen)
        found = step.split(step.select(y))
    own.check()
    return found


@pytest.mark.parametrize("page_tokens", [1, 4, 6])
@pytest.mark.parametrize("ends", [(N_TOKENS,), tuple(range(1, N_TOKENS + 1)), (2, 3, 5, 6, 17, 18, N_TOKENS)])
def test_queries_read_chosen_spans_and_the_rows_behind_the_last(page_tokens: int, ends: tuple[int, ...]) -> None:
    own, rows = memory(page_tokens=page_tokens), Rows(1)
    sequence = own.open()
    found = torch.cat([y for end in ends for y in feed(own, (sequence, rows, end))])
    for t in range(N_TOKENS):
        assert_kernel_close(found[t : t + 1], rows.expected(t))


def test_spans_that_divide_a_page_are_read_whole() -> None:
    spec = MemorySpec(((replace(ATTENTION, span_tokens=2), replace(INDEX, span_tokens=2)),), 9)
    own, rows = memory(spec), Rows(1, span=2)
    (found,) = feed(own, (own.open(), rows, N_TOKENS))
    for t in range(N_TOKENS):
        assert_kernel_close(found[t : t + 1], rows.expected(t))


def test_a_neighbour_that_reads_everything_changes_no_bit() -> None:
    own, rows, few = memory(), Rows(1), Rows(2)
    long, short, alone = own.open(), own.open(), own.open()
    feed(own, (long, rows, 12), (alone, rows, 12))
    for end in (13, 14, 15):  # Some of these tokens complete a span, and some do not.
        (expected,) = feed(own, (alone, rows, end))
        found, other = feed(own, (long, rows, end), (short, few, short.length + 1))
        assert torch.equal(found, expected)
        assert_kernel_close(other, few.expected(short.length - 1))


def test_a_rollback_into_a_span_takes_its_key_back() -> None:
    own, rows, others = memory(), Rows(1), Rows(2)
    sequence = own.open()
    feed(own, (sequence, rows, 15))
    fork = own.fork(sequence)
    own.rollback(sequence, to=13)
    for name, x in others.of.items():
        x[:13] = rows.of[name][:13]
    (found,) = feed(own, (sequence, others, N_TOKENS))
    (unchanged,) = feed(own, (fork, rows, N_TOKENS))
    for t in range(15, N_TOKENS):
        assert_kernel_close(found[t - 13 : t - 12], others.expected(t))
        assert_kernel_close(unchanged[t - 15 : t - 14], rows.expected(t))


def test_tokens_that_a_step_does_not_accept_complete_no_span() -> None:
    own, rows = memory(), Rows(1)
    sequence = own.open()
    feed(own, (sequence, rows, 13))
    given = rows[13:18]
    with own.step({sequence: [1] * 5}) as step:
        chosen = step.choose(0, given["index_q"], given["index_k"], given["weights"])
        step.attend(0, given["q"], given["k"], given["v"], chosen=chosen)
        step.accept({sequence: 1})
    own.check()
    others = Rows(2)
    for name, x in others.of.items():
        x[:14] = rows.of[name][:14]
    (found,) = feed(own, (sequence, others, N_TOKENS))
    for t in range(14, N_TOKENS):
        assert_kernel_close(found[t - 14 : t - 13], others.expected(t))


def test_one_key_is_kept_for_a_span() -> None:
    own, rows = memory(page_tokens=4), Rows(1)
    sequence = own.open()
    pages = []
    for end in (2, 3, 12, 14, 15):
        feed(own, (sequence, rows, end))
        pages.append(own.counters.bytes_by_pool()["pages of index"] // 64)  # A page has four keys of 16 bytes.
    assert pages == [0, 1, 1, 1, 2]


def test_keys_move_with_whole_spans_behind_dropped_ones() -> None:
    turned = Rotation((0.7,), start=1)
    spec = MemorySpec(((ATTENTION, replace(INDEX, rotation=turned)),), 9)
    own, rows = memory(spec), Rows(1)
    sequence = own.open()
    feed(own, (sequence, rows, 18))
    with pytest.raises(DropError, match="give multiples of 3"):
        own.drop(sequence, 3, 8)
    own.drop(sequence, 3, 9)
    own.check()
    for name, x in rows.of.items():
        moved = x[9:18].clone()
        if name == "index_k":
            moved = turned.rotated(moved, turned.angles_between(*(torch.arange(n, n + 9).numpy() for n in (9, 3))))
        x[3:12], x[12:18] = moved, x[18:24].clone()
    (found,) = feed(own, (sequence, rows, 16))
    for t in range(12, 16):
        assert_kernel_close(found[t - 12 : t - 11], rows.expected(t))


@pytest.mark.parametrize("n_chosen", [7, None])
def test_an_index_chooses_whole_spans(n_chosen: int | None) -> None:
    with pytest.raises(SpecError, match="multiple of span_tokens"):
        AttentionSpec(6, 2, 4, n_chosen=n_chosen, span_tokens=SPAN)
    if n_chosen is not None:
        with pytest.raises(SpecError, match="multiple of span_tokens"):
            IndexSpec(2, 4, n_chosen, span_tokens=SPAN)


def test_rows_of_another_index_are_refused() -> None:
    own, rows = memory(), Rows(1)[0:1]
    with pytest.raises(StepError, match="6 rows in spans of 3"), own.step({own.open(): [1]}) as step:
        step.choose(0, rows["index_q"], rows["index_k"], rows["weights"])
        step.attend(0, rows["q"], rows["k"], rows["v"], chosen=ChosenRows(N_CHOSEN, None))
