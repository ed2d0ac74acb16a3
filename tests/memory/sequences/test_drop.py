"""Tokens are dropped from the middle, and the outputs are those of sequences that never saw them.

Models have one layer, so no other layer carries a trace.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from hybridmem.memory import (
    UNROTATED,
    AttentionSpec,
    CapacityError,
    DropError,
    HybridMemory,
    IntegrityError,
    MemorySpec,
    RecurrentSpec,
    RollbackError,
    Rotation,
    Sequence,
    SequenceError,
    SpecError,
    StateTensor,
    Step,
)
from hybridmem.memory.eviction import Recent
from hybridmem.memory.quantization import Quantized
from hybridmem.memory.recurrences import Fold
from tests.extent import few_cases
from tests.inside import books, peak_of, state_offset, stored_keys
from tests.subjects import IS_FULL
from tests.tolerances import assert_kernel_close
from tests.toy import average

Layout = Literal["half", "interleaved"]
FREQUENCIES = (1.0, 0.4, 0.03)
N_TOKENS = 97


def rotate(x_TGD: Tensor, positions_T: Tensor, rotation: Rotation) -> Tensor:
    """Rotate pair by pair, as models do."""
    out = x_TGD.clone()
    n = len(rotation.frequencies)
    for j, frequency in enumerate(rotation.frequencies):
        a, b = (rotation.start + i for i in ((j, j + n) if rotation.layout == "half" else (2 * j, 2 * j + 1)))
        angle = (positions_T.float() * torch.tensor(frequency))[:, None]
        out[..., a] = x_TGD[..., a] * angle.cos() - x_TGD[..., b] * angle.sin()
        out[..., b] = x_TGD[..., b] * angle.cos() + x_TGD[..., a] * angle.sin()
    return out


class Table:
    """A model of attention layers, and of recurrences if asked for, side by side.

    It reads everything from tables by token, and nothing from earlier outputs.
    """

    def __init__(
        self, *rotations: Rotation | None, windows: Seq[int | None] = (None,), recurrent: bool = False,
        dtype: torch.dtype = torch.float32, heads: tuple[int, int, int] = (4, 2, 8), device: str = "cpu",
    ) -> None:  # fmt: skip
        n_heads, n_kv, dim = heads
        self.attention = [AttentionSpec(*heads, window=w, rotation=r) for r in rotations for w in windows]
        means = (StateTensor("mean", (5,)), StateTensor("highest", (5,), initial=-3.0))
        self.recurrence = (RecurrentSpec("average", (5,), means),) if recurrent else ()
        layers = (*((spec,) for spec in self.attention), self.recurrence)
        self.memory_spec = MemorySpec(layers, N_TOKENS, dtype=dtype, device=torch.device(device))
        generator = torch.Generator().manual_seed(3)
        self.tables = [
            tuple(torch.randn(N_TOKENS, n, dim, generator=generator) for n in (n_heads, n_kv, n_kv))
            for _ in self.attention
        ]
        self.rows = torch.randn(N_TOKENS, 5, generator=generator)

    def __call__(self, step: Step) -> Tensor:
        """Return (T, outputs): what each attention gives, then what the recurrence gives."""
        parts, dtype = [], self.memory_spec.dtype
        for i, (spec, tables) in enumerate(zip(self.attention, self.tables, strict=True)):
            q, k, v = (table[step.token_ids] for table in tables)
            if spec.rotation is not None:
                q, k = (rotate(x, step.positions, spec.rotation) for x in (q, k))
            parts.append(step.attend(i, q.to(dtype), k.to(dtype), v.to(dtype)).flatten(1))
        if self.recurrence:
            parts.append(step.recur(len(self.attention), self.rows[step.token_ids].to(dtype), Fold(average)))
        return step.select(torch.cat(parts, -1).float())

    @property
    def n_attended(self) -> int:
        return sum(spec.n_query_heads * spec.head_dim for spec in self.attention)

    def memory(self, budget: int | str = "256KiB", **options: Any) -> HybridMemory:
        return HybridMemory(
            self.memory_spec, budget, **({"rollback_window": 6, "page_tokens": 4, "poison": True} | options)
        )

    def feed(self, memory: HybridMemory, sequence: Sequence, tokens: Seq[int]) -> Tensor:
        with memory.step({sequence: list(tokens)}, outputs="all") as step:
            out = self(step)
        memory.check()
        return out

    def fresh(self, tokens: Seq[int], n_last: int) -> Tensor:
        """Return what the last tokens give in a sequence that saw only these."""
        memory = self.memory()
        return self.feed(memory, memory.open(), tokens)[-n_last:]

    def assert_is(
        self, memory: HybridMemory, sequence: Sequence, tokens: Seq[int], *, own: Seq[int] | None = None
    ) -> None:
        """Assert that a fork reads all that a sequence of these tokens would. Its states are those of `own`."""
        assert sequence.tokens.tolist() == list(tokens)
        probe = memory.fork(sequence)
        actual, n = self.feed(memory, probe, PROBE), self.n_attended
        memory.close(probe)
        assert_kernel_close(actual[:, :n], self.fresh([*tokens, *PROBE], len(PROBE))[:, :n], self.memory_spec.dtype)
        if self.recurrence:
            own = tokens if own is None else own
            assert_kernel_close(actual[:, n:], self.fresh([*own, *PROBE], len(PROBE))[:, n:], self.memory_spec.dtype)


PROBE = (5, 60, 33)
HALF, INTERLEAVED = Rotation(FREQUENCIES), Rotation(FREQUENCIES, "interleaved")
LAST = Rotation((1.0, 0.2), start=4)
RANGES = [
    (0, 1),
    (0, 8),
    (0, 30),
    (3, 4),
    (3, 9),
    (4, 8),
    (5, 23),
    (7, 28),
    (8, 16),
    (29, 30),
    (30, 33),
    (12, 33),
    (16, 17),
    (9, 9),
]


@few_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rotations",
    [
        (HALF,),
        (INTERLEAVED,),
        (replace(HALF, frequencies=(1.0, 0.3, 0.1, 0.01)),),
        (LAST,),
        (UNROTATED,),
        (HALF, INTERLEAVED, UNROTATED),
    ],
    ids=["half", "interleaved", "the whole head", "its last part", "not", "several"],
)
def test_what_is_left_is_as_if_fed_alone(rotations: tuple[Rotation, ...], dtype: torch.dtype) -> None:
    """Ranges are aligned with pages of 4 or not.

    They begin at the first token, end at the last one, or leave no row to move.
    """
    model = Table(*rotations, dtype=dtype)
    tokens = list(range(33))
    for start, end in RANGES:
        memory = model.memory()
        sequence = memory.open()
        model.feed(memory, sequence, tokens)
        memory.drop(sequence, start, end)
        memory.check()
        model.assert_is(memory, sequence, tokens[:start] + tokens[end:])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_keys_far_out_are_those_of_their_new_positions(layout: Layout) -> None:
    """A model rounds its angles to float32.

    At position 20,000, this rounding of an angle exceeds 1e-5.
    """
    rotation = Rotation(tuple(10_000.0 ** (-i / 8) for i in range(8)), layout)
    model = Table(rotation, heads=(1, 1, 16))
    memory = model.memory("4MiB", page_tokens=64)
    sequence = memory.open()
    tokens = [i % N_TOKENS for i in range(20_000)]
    with memory.step({sequence: tokens}) as step:
        model(step)
    memory.drop(sequence, 10, 12_345)
    kept = torch.tensor(tokens[:10] + tokens[12_345:])
    expected = rotate(model.tables[0][1][kept], torch.arange(len(kept)), rotation)
    assert_kernel_close(stored_keys(memory, sequence, 0), expected)


# The tests below are about everything else that happens to a sequence.


@dataclass
class Twin:
    """Holds what a sequence should be: its tokens, and all tokens that its states have seen."""

    tokens: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)

    def feed(self, tokens: list[int]) -> None:
        self.tokens, self.own = self.tokens + tokens, self.own + tokens

    def cut(self, to: int) -> None:
        self.own = self.own[: len(self.own) - len(self.tokens) + to]
        self.tokens = self.tokens[:to]


class Walk:
    """Applies random operations to a memory and to twins."""

    def __init__(self, model: Table, rng: random.Random, rollback_window: int, fold: str) -> None:
        self.model, self.rng, self.rollback_window = model, rng, rollback_window
        self.memory = model.memory(rollback_window=self.rollback_window, fold=fold)
        self.twins = {self.memory.open(): Twin()}
        self.done: Counter[str] = Counter()

    def run(self, n_operations: int) -> None:
        for _ in range(n_operations):
            sequence = self.rng.choice([s for s in self.twins if not s.is_checkpoint])
            name = self.rng.choice(["feed", "feed", "drop", "drop", "drop", "rollback", "rollback", "copy", "accept"])
            self.done[name] += getattr(self, name)(sequence, self.twins[sequence])
            self.memory.check()
            self.compare(sequence)
        for sequence in self.twins:
            self.compare(sequence)
            self.memory.close(sequence)
        assert self.memory.usage().used_bytes == 0

    def compare(self, sequence: Sequence) -> None:
        self.model.assert_is(self.memory, sequence, self.twins[sequence].tokens, own=self.twins[sequence].own)
        reached = peak_of(self.memory, sequence) - self.rollback_window
        assert self.model.recurrence or sequence.horizon <= max(0, reached)

    def feed(self, sequence: Sequence, twin: Twin) -> bool:
        tokens = [self.rng.randrange(N_TOKENS) for _ in range(self.rng.choice([1, 2, 9, 45]))]
        self.model.feed(self.memory, sequence, tokens)
        twin.feed(tokens)
        return True

    def accept(self, sequence: Sequence, twin: Twin) -> bool:
        with self.memory.step({sequence: [1, 2, 3, 4]}) as step:
            self.model(step)
            n_kept = self.rng.randint(1, 4)
            try:
                step.accept({sequence: n_kept})
            except RollbackError:
                n_kept = 4
        twin.feed([1, 2, 3, 4][:n_kept])
        return n_kept < 4

    def drop(self, sequence: Sequence, twin: Twin) -> bool:
        start = self.rng.randint(0, sequence.length)
        end = self.rng.randint(start, min(sequence.length, start + 20))
        if end == sequence.length and self.memory.can_rollback(sequence, start):
            reaches, length = start >= sequence.horizon, sequence.length
            self.memory.drop(sequence, start, end)
            if start < length:
                self.go_back(sequence, twin, start, reaches)
            return False
        try:
            self.memory.drop(sequence, start, end, approximate=True)
        except DropError as error:
            assert "window" in str(error) and any(spec.window for spec in self.model.attention)
            return False
        twin.tokens = twin.tokens[:start] + twin.tokens[end:]
        return end > start

    def rollback(self, sequence: Sequence, twin: Twin) -> bool:
        to = self.rng.choice([self.rng.randint(0, sequence.length), max(0, sequence.length - self.rng.randint(0, 3))])
        if not self.memory.can_rollback(sequence, to):
            return False
        reaches = to >= sequence.horizon
        self.memory.rollback(sequence, to=to)
        self.go_back(sequence, twin, to, reaches)
        return True

    def go_back(self, sequence: Sequence, twin: Twin, to: int, reaches: bool) -> None:
        if reaches:
            twin.cut(to)
            return
        # The rollback went through a checkpoint or to the very start. So the states contain no dropped tokens but those
        # of such a checkpoint.
        marks = [m for s, m in self.twins.items() if s.is_checkpoint and m.tokens[:to] == twin.tokens[:to]]
        offset = state_offset(self.memory, sequence)
        assert offset in (0, *(len(m.own) - len(m.tokens) for m in marks))
        mark = next((m for m in marks if len(m.own) - len(m.tokens) == offset), Twin(twin.tokens, twin.tokens))
        twin.tokens, twin.own = mark.tokens, mark.own
        twin.cut(to)

    def copy(self, sequence: Sequence, twin: Twin) -> bool:
        if len(self.twins) < 6:
            copy = self.memory.checkpoint(sequence) if self.rng.random() < 0.5 else self.memory.fork(sequence)
            self.twins[copy] = replace(twin)
        return True


@few_cases
@pytest.mark.parametrize(
    ("windows", "fold"),
    [((None,), None), ((5, None), None), ((9,), None), ((None,), "keep"), ((5, None), "replay"), ((9,), "keep")],
    ids=str,
)
@pytest.mark.parametrize("rollback_window", [0, 3, 6] if IS_FULL else [0, 6])
def test_anything_in_any_order(windows: tuple[int | None, ...], fold: str | None, rollback_window: int) -> None:
    """There are steps, drops, rollbacks, forks and checkpoints, with recurrences that fold or without.

    Each sequence reads what a fresh one would.
    """
    model = Table(HALF, UNROTATED, windows=windows, recurrent=fold is not None)
    walk = Walk(model, random.Random(300 + rollback_window), rollback_window, fold or "keep")
    walk.run(45)
    assert walk.done["drop"] > 2 and walk.done["rollback"] > 2, walk.done


def test_others_keep_what_they_have_bit_for_bit() -> None:
    """A fork and a checkpoint share pages with the sequence that drops.

    Pages before the range stay shared, and nothing is written into others' pages.
    """
    model = Table(HALF)
    memory = model.memory()
    a = memory.open()
    model.feed(memory, a, range(40))
    b, mark = memory.fork(a), memory.checkpoint(a)
    before = stored_keys(memory, b, 0)
    memory.drop(a, 10, 20)
    pages = [memory.counters.inventory(s).groups[0].holdings[0].ids.tolist() for s in (a, b, mark)]
    assert pages[1] == pages[2] and pages[0][:2] == pages[1][:2] and not set(pages[0][2:]) & set(pages[1])
    assert torch.equal(stored_keys(memory, b, 0), before)
    assert torch.equal(stored_keys(memory, a, 0)[:10], before[:10])
    model.assert_is(memory, b, range(40))
    memory.rollback(a, to=mark)
    model.assert_is(memory, a, range(40))


def test_what_has_no_room_is_refused_and_nothing_has_changed() -> None:
    model = Table(HALF, windows=(None, 30))
    page_bytes = model.memory().usage().block_bytes
    # There is room for the 7 pages that one of the two layer memories copies, and for 3 of those that the other copies.
    memory = model.memory(budget=11 * page_bytes["pages"] + 15 * page_bytes["pages over 30"])
    sequence = memory.open()
    model.feed(memory, sequence, range(32))
    before = memory.usage()
    with pytest.raises(CapacityError, match="behind the dropped tokens") as caught:
        memory.drop(sequence, 3, 7)
    assert caught.value.free == before.free_bytes < caught.value.needed
    memory.check()
    assert memory.usage() == before and sequence.tokens.tolist() == list(range(32))
    expected = rotate(model.tables[0][1][:32], torch.arange(32), HALF)
    assert_kernel_close(stored_keys(memory, sequence, 0), expected)
    memory.drop(sequence, 26, 30)
    assert_kernel_close(stored_keys(memory, sequence, 0)[:26], expected[:26])


BAD_RANGES: list[tuple[Any, Any]] = [(-1, 2), (3, 2), (0, 21), (20, 21), (0.0, 2), (True, 2), (0, None), ("1", 2)]


@pytest.mark.parametrize(("start", "end"), BAD_RANGES)
def test_bad_ranges(start: Any, end: Any) -> None:
    model = Table(HALF)
    memory = model.memory()
    sequence = memory.open()
    model.feed(memory, sequence, range(20))
    with pytest.raises(DropError, match="20 tokens") as caught:
        memory.drop(sequence, start, end)
    assert (caught.value.start, caught.value.end) == (start, end)
    assert sequence.length == 20


def test_bad_handles() -> None:
    model = Table(HALF)
    memory = model.memory()
    sequence = memory.open()
    model.feed(memory, sequence, range(20))
    mark = memory.checkpoint(sequence)
    with pytest.raises(SequenceError, match="checkpoint"):
        memory.drop(mark, 1, 2)
    with memory.step({sequence: [1]}) as step:
        with pytest.raises(SequenceError, match="open step"):
            memory.drop(sequence, 1, 2)
        model(step)
    memory.close(sequence)
    with pytest.raises(SequenceError, match="closed"):
        memory.drop(sequence, 1, 2)


def test_recurrent_layers_must_be_asked_for() -> None:
    model = Table(HALF, recurrent=True)
    memory = model.memory()
    sequence = memory.open()
    model.feed(memory, sequence, range(40))
    with pytest.raises(DropError, match=r"average.*approximate=True"):
        memory.drop(sequence, 5, 15)
    memory.check()
    model.assert_is(memory, sequence, range(40))
    memory.drop(sequence, 36, 40)  # Dropping the end is a rollback.
    model.assert_is(memory, sequence, range(36))
    memory.drop(sequence, 5, 15, approximate=True)
    model.assert_is(memory, sequence, [*range(5), *range(15, 36)], own=range(36))
    # The states are 10 tokens ahead of the sequence. The horizon counts in the sequence: 30 - 10.
    assert sequence.length == 26 and sequence.horizon == 20


def test_after_an_approximate_drop_no_rollback_by_position_passes_its_start() -> None:
    """The states before that position contain dropped tokens. Position 0 is a new beginning.

    A checkpoint from before the drop still has what it had.
    """
    model = Table(HALF, recurrent=True)
    memory = model.memory()
    sequence = memory.open()
    model.feed(memory, sequence, range(20))
    mark = memory.checkpoint(sequence)
    model.feed(memory, sequence, range(20, 40))
    memory.drop(sequence, 2, 38, approximate=True)
    assert sequence.length == 4 and sequence.horizon == 2
    assert memory.resume_point(sequence, 1) == 0
    memory.rollback(sequence, to=2)
    model.assert_is(memory, sequence, [0, 1], own=range(38))
    memory.rollback(sequence, to=0)
    model.assert_is(memory, sequence, [])
    memory.rollback(sequence, to=mark)
    model.assert_is(memory, sequence, range(20))
    memory.drop(sequence, 0, 19, approximate=True)
    assert sequence.length == 1 and sequence.horizon == 1
    memory.rollback(sequence, to=0)
    model.assert_is(memory, sequence, [])


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_mark_that_dropped_tokens_is_no_shortcut_for_one_that_fed_the_same(recurrent: bool) -> None:
    """Equal tokens are not equal memories.

    What a model computes of them depends on what it saw.
    """
    model = Table(HALF, windows=(5,), recurrent=recurrent)
    memory = model.memory()
    a = memory.open()
    model.feed(memory, a, range(8))
    b = memory.fork(a)
    model.feed(memory, a, range(8, 30))
    memory.drop(a, 8, 12, approximate=True)
    mark = memory.checkpoint(a)
    model.feed(memory, b, [*range(12, 30), *range(40, 70)])
    assert b.tokens[:26].tolist() == mark.tokens.tolist()
    reachable = [to for to in range(9, 27) if memory.can_rollback(b, to)]
    assert reachable == []
    # The sequence that dropped them may use the checkpoint, and so may its later forks.
    model.feed(memory, a, range(40, 70))
    assert memory.can_rollback(memory.fork(a), 26)
    memory.rollback(a, to=26)
    model.assert_is(memory, a, [*range(8), *range(12, 30)], own=range(30))


def test_a_second_drop_before_the_first_needs_what_came_before_anew() -> None:
    """Checkpoints between two drops contain only the first drop.

    They serve up to its position.
    """
    model = Table(HALF, windows=(5,))
    memory = model.memory()
    a = memory.open()
    model.feed(memory, a, [7] * 40)
    memory.drop(a, 20, 24)
    mark = memory.checkpoint(a)
    memory.drop(a, 10, 12)
    model.feed(memory, a, [7] * 40)
    assert [to for to in range(12, 40) if memory.can_rollback(a, to)] == []
    memory.rollback(a, to=mark)
    model.assert_is(memory, a, [7] * 36)


def test_attention_that_cannot_move_its_rows_says_so() -> None:
    sparse = Table(HALF)
    sparse.memory_spec = sparse.memory_spec.with_policy(Recent(64))
    quantised = Table(HALF)
    quantised.memory_spec = quantised.memory_spec.with_storage(Quantized(4, group=8))
    unknown = Table(None)
    for model, named in ((sparse, r"Recent\(64\)"), (quantised, "4 bits"), (unknown, "rotation=")):
        memory = model.memory()
        sequence = memory.open()
        model.feed(memory, sequence, range(40))
        with pytest.raises(DropError, match=named):
            memory.drop(sequence, 5, 15, approximate=True)
        memory.check()
        assert sequence.tokens.tolist() == list(range(40))
        memory.drop(sequence, 36, 40)
        assert sequence.length == 36


def test_a_window_that_would_reach_back_to_rows_that_have_left() -> None:
    """After 60 tokens, 6 of which may be taken back, a window of 9 tokens needs rows from 46 on.

    So at most 26 tokens may be dropped from 20 on.
    """
    model = Table(HALF, windows=(9,))
    memory = model.memory()
    sequence = memory.open()
    model.feed(memory, sequence, range(60))
    for start, end, remedy in ((20, 47, "at most 26 tokens"), (50, 55, "at most 2 tokens")):
        with pytest.raises(DropError, match=f"window of 9 tokens.*{remedy}"):
            memory.drop(sequence, start, end)
        memory.check()
        model.assert_is(memory, sequence, range(60))
    other = memory.fork(sequence)
    memory.drop(other, 50, 52)
    model.assert_is(memory, other, [*range(50), *range(52, 60)])
    with pytest.raises(DropError, match="feed what is to stay"):
        memory.drop(other, 50, 51)
    # This is further back than the promised 6 tokens, because a page begins there.
    memory.rollback(other := memory.fork(sequence), to=52)
    with pytest.raises(DropError, match="feed what is to stay"):
        memory.drop(other, 50, 51)
    memory.drop(other := memory.fork(sequence), 20, 43)  # The oldest row, 44, is now in the middle of a page.
    assert other.horizon == memory.fork(other).horizon == 44 - 23 + 8
    memory.drop(sequence, 20, 46)
    model.assert_is(memory, sequence, [*range(20), *range(46, 60)])
    memory.rollback(sequence, to=sequence.length - 6)
    model.assert_is(memory, sequence, [*range(20), *range(46, 54)])
    with pytest.raises(RollbackError):
        memory.rollback(sequence, to=27)


def test_a_dry_run_keeps_the_same_books() -> None:
    model = Table(HALF, windows=(None, 9), recurrent=True)
    real, dry = model.memory(), model.memory(device="meta", poison=False)
    seen = []
    for memory in (real, dry):
        sequence = memory.open()
        if memory is real:
            model.feed(memory, sequence, range(60))
        else:
            memory.run(None, {sequence: list(range(60))})
        memory.drop(sequence, 3, 30, approximate=True)
        memory.check()
        seen.append((sequence.length, sequence.horizon, sequence.tokens.tolist(), memory.usage()))
    assert seen[0] == seen[1]


def test_books_that_do_not_balance_are_found() -> None:
    model = Table(HALF, windows=(9,), recurrent=True)

    def dropped() -> tuple[HybridMemory, int]:
        memory = model.memory()
        sequence = memory.open()
        model.feed(memory, sequence, range(60))
        memory.drop(sequence, 3, 20, approximate=True)
        return memory, sequence.slot

    for column, wrong, says in (("floor", 44, "states from 44"), ("offset", 3, None), ("oldest", 35, "rows from 35")):
        memory, slot = dropped()
        books(memory)[column][slot] = wrong
        with pytest.raises(IntegrityError, match=says):
            memory.check()
    for column in ("offset", "floor", "oldest", "seams"):
        memory, slot = dropped()
        entries = books(memory)[column]
        entries[slot + 1] = entries[slot]
        with pytest.raises(IntegrityError):
            memory.check()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rotation((1.0,), "quarter"),  # type: ignore[arg-type]
        lambda: Rotation([1.0]),  # type: ignore[arg-type]
        lambda: Rotation((float("nan"),)),
        lambda: AttentionSpec(1, 1, 4, rotation=Rotation((1.0, 0.1, 0.01))),
        lambda: AttentionSpec(1, 1, 4, rotation=Rotation((1.0,), start=3)),
        lambda: Rotation((1.0,), start=-1),
        lambda: AttentionSpec(1, 1, 4, rotation="half"),  # type: ignore[arg-type]
    ],
)
def test_bad_rotations(make: Callable[[], object]) -> None:
    with pytest.raises(SpecError):
        make()


def test_positions_of_states_after_several_drops() -> None:
    """The second drop also moves the position of the first one.

    Part of a step is kept by the positions of the sequence, not by those of its states.
    """
    model = Table(HALF, recurrent=True)
    memory = model.memory()
    a = memory.open()
    model.feed(memory, a, range(8))
    b = memory.fork(a)
    model.feed(memory, a, range(8, 40))
    memory.drop(a, 8, 39, approximate=True)
    memory.checkpoint(a)  # The states of `a` at 8 contain dropped tokens; those of `b` at 8 do not.
    model.feed(memory, b, range(50, 90))
    assert memory.resume_point(b, 8) == 0
    memory.drop(a, 3, 6, approximate=True)
    assert a.length == 6 and a.horizon == 5
    with memory.step({a: [1, 2, 3, 4]}) as step:
        model(step)
        step.accept({a: 1})
    model.assert_is(memory, a, [0, 1, 2, 6, 7, 39, 1], own=[*range(40), 1])
