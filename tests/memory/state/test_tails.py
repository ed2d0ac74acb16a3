"""Bodies, tails and heads are compared with a plain model of them.

It says where they are, what they take, and which rows run again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import pytest
import torch

from hybridmem.memory import CapacityError, HybridMemory, RollbackError, Sequence, States
from hybridmem.memory.recurrences import Fold
from hybridmem.memory.sequences.folding import TailRules
from hybridmem.memory.state.readers import HeadReader
from tests.inside import layer_memories, peak_of, state_offset
from tests.toy import Toy

Mode = Literal["keep", "replay", "defer"]
HOST, DRY = Toy(attention=False), Toy(attention=False, device=torch.device("meta"))
HYBRID = Toy(device=torch.device("meta")).memory_spec
N_RECURRENCES = 3


def make(model: Toy, window: int, fold: Mode = "keep", budget: int | str = "1MiB") -> HybridMemory:
    return HybridMemory(model.memory_spec, budget, rollback_window=window, fold=fold, poison=True)


def feed(memory: HybridMemory, requests: Mapping[Sequence, list[int]], kept: Mapping[Sequence, int] = {}) -> Any:
    with memory.step(requests, outputs="all") as step:
        logits = HOST(step) if memory.spec.device.type == "cpu" else None
        step.accept(kept)
    memory.check()
    return logits


@contextmanager
def counted_rows() -> Iterator[list[int]]:
    """Count the rows that recurrences run, including rows of tails."""
    rows, plain = list[int](), Fold.__call__

    def counting(self: Fold, states: States, own_rows: torch.Tensor) -> tuple[torch.Tensor, States]:
        rows.append(len(own_rows))
        return plain(self, states, own_rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fold, "__call__", counting)
        yield rows


@pytest.mark.parametrize("window", [0, 1, 4, 9])
@pytest.mark.parametrize("fold", ["keep", "replay"])
def test_decoding_takes_the_least_budget_at_most(fold: Mode, window: int) -> None:
    memory = make(DRY, window, fold)
    sequence, used = memory.open(), 0
    for _ in range(4 * window + 9):
        with memory.step({sequence: [1]}):
            used = max(used, memory.counters.used_bytes)
    assert used == memory.counters.least_bytes


def test_blocks_lie_where_they_leave_most_room_between() -> None:
    """Pages are taken from the low end of the budget, and states and tails from the high end."""
    memory = HybridMemory(HYBRID, "1MiB", rollback_window=4)
    memory.run(None, {memory.open(): [1] * 40})
    places = dict[str, tuple[int, int]]()
    for layers in layer_memories(memory).values():
        for pool, _ in layers.pools:
            taken = pool.addresses[pool.counts > 0]
            places[pool.name] = int(taken.min()), int(taken.max()) + pool.block_bytes
    budget = memory.counters.budget_bytes
    assert places["pages"] == (0, memory.usage().by_kind["pages"])
    ends = {end for name, (_, end) in places.items() if name != "pages"}
    assert max(ends) == budget and min(start for name, (start, _) in places.items() if name != "pages") > budget // 2


@pytest.mark.parametrize("fold", ["keep", "replay"])
def test_positions_and_rows_are_those_of_a_plain_model(fold: Mode) -> None:
    """States are ahead of their sequences or not, and anything may happen to the sequences."""
    rng, window = random.Random(4), 5
    memory, rules = make(DRY, window, fold), TailRules.of(fold, window)
    table = layer_memories(memory)["recurrence"]
    live = [memory.open()]
    for _ in range(150):
        sequence, name = rng.choice(live), rng.choice(["feed", "feed", "back", "fork", "drop"])
        stands = name == "feed"
        if name == "feed":
            feed(memory, {s: [1] * rng.choice([1, 1, 2, 7, 23]) for s in {sequence, live[0]}})
        elif name == "back":
            memory.rollback(sequence, to=rng.randint(sequence.horizon, sequence.length))
        elif name == "fork" and len(live) < 20:
            live.append(memory.fork(sequence))
        elif name == "drop" and sequence.length > 3:
            memory.drop(sequence, 1, 3, approximate=True)
        offset, length = state_offset(memory, sequence), sequence.length
        body_at = int(rules.body_at(np.array(peak_of(memory, sequence) + offset)))
        assert sequence.horizon >= body_at - offset
        body, head, kept, tail = memory.counters.inventory(sequence).groups[0].holdings
        assert [body.pool, head.pool, kept.pool, tail.pool] == ["states"] * 3 + ["tails"]
        assert [body.part, head.part, kept.part, tail.part] == ["body", "head", "head", "tail"]
        assert body.ends.tolist() == tail.starts.tolist() == [max(0, body_at - offset)]
        assert (tail.fold_tokens, body.fold_tokens, tail.ends) == (rules.fold_tokens, None, None)
        assert not body.starts.any() and not head.starts.any() and not kept.starts.any()
        if stands:
            assert length in (*head.ends.tolist(), *kept.ends.tolist()) or length + offset == body_at
        rows = table.live_rows(sequence.slot, length)
        is_live = [*[True] * len(body.ids), *[bool(head.ends >= 0)] * len(head.ids), *[True] * len(kept.ids)]
        assert rows["states"].tolist() == [[is_fresh] for is_fresh in is_live]
        ring = {position % rules.tail_rows for position in range(body_at, length + offset)}
        assert [{*row.nonzero()[0].tolist()} for row in rows["tails"]] == [ring] * len(tail.ids)
        assert {name: ids.tolist() for name, ids in table.blocks_of(sequence.slot).items()} == {
            "states": [*body.ids.tolist(), *head.ids.tolist(), *kept.ids.tolist()], "tails": tail.ids.tolist(),
        }  # fmt: skip
    assert any(state_offset(memory, sequence) for sequence in live)


@pytest.mark.parametrize("fold", ["keep", "replay"])
@pytest.mark.parametrize("n_dropped", [0, 3])
def test_what_a_step_will_take_is_known_where_states_are_ahead(fold: Mode, n_dropped: int) -> None:
    for length in range(20, 33, 2):
        memory = make(DRY, 6, fold)
        sequence = memory.open()
        feed(memory, {sequence: [1] * length})
        if n_dropped:
            memory.drop(sequence, 2, 2 + n_dropped, approximate=True)
        for n_tokens in (1, 4, 9):
            before, counts = memory.counters.used_bytes, np.array([n_tokens])
            told = memory.counters.lack_of_room(np.array([sequence.slot]), counts, n_tokens).needed
            with memory.step({sequence: [1] * n_tokens}):
                used = memory.counters.used_bytes
            assert told == max(used, memory.counters.used_bytes) - before


def test_tokens_can_be_taken_back_in_a_step_where_they_could_be_behind_it() -> None:
    """The body moves as far as the states are, which are ahead of the sequence."""
    n_refused = 0
    for length in range(20, 28, 3):
        memory = make(DRY, 4, "replay")
        sequence = memory.open()
        feed(memory, {sequence: [1] * length})
        memory.drop(sequence, 2, 5, approximate=True)
        behind = memory.fork(sequence)
        feed(memory, {behind: [1] * 9})
        for n_kept in range(1, 10):
            fork = memory.fork(sequence)
            with memory.step({fork: [1] * 9}) as step:
                if fork.length + n_kept < behind.horizon:
                    n_refused += 1
                    with pytest.raises(RollbackError):
                        step.accept({fork: n_kept})
                else:
                    step.accept({fork: n_kept})
            memory.check()
    assert n_refused > 5


@pytest.mark.parametrize("fold, to", [("keep", 20), ("keep", 16), ("replay", 20)])
def test_no_row_runs_again_behind_a_state_that_is_at_hand(fold: Mode, to: int) -> None:
    """After a rollback to the end or to a kept state, no row runs again.

    One token further back, the rows from there on do.
    """
    for behind in (0, 1):
        memory = make(HOST, 8, fold)
        sequence = memory.open()
        for n_tokens in (15, *[1] * (5 + behind)):
            feed(memory, {sequence: [1] * n_tokens})
        memory.rollback(sequence, to=to)
        with counted_rows() as rows:
            feed(memory, {sequence: [2]})
        n_again = {0: 0, 1: 0 if fold == "keep" and to == 16 else 4 if fold == "keep" else to - sequence.horizon}
        assert sum(rows) == N_RECURRENCES * (1 + n_again[behind])


def test_a_step_that_is_aborted_leaves_the_head_that_it_wrote_over() -> None:
    """This holds at every length, whether heads are written in place or not."""
    memory, twin = make(HOST, 4), make(HOST, 4)
    sequence, other = memory.open(), twin.open()
    for token in range(13):
        for tokens in ([7], [3, 5, 8]):
            with pytest.raises(KeyError), memory.step({sequence: tokens}) as step:
                HOST(step)
                raise KeyError
            memory.check()
        assert torch.equal(feed(memory, {sequence: [token]}), feed(twin, {other: [token]}))
        assert memory.usage() == twin.usage()


@pytest.mark.parametrize("n_fed", [3, 13])
def test_tokens_that_are_not_kept_leave_nothing(n_fed: int) -> None:
    """Some tokens of one request are kept, none of another, and all of a third.

    Each continues as if it had been fed only the kept ones.
    """
    tokens = [i % 7 for i in range(n_fed)]
    for n_kept in range(max(0, n_fed - 4), n_fed + 1, 2):
        memory = make(HOST, 4)
        some, none, every = (memory.open() for _ in range(3))
        feed(memory, {none: [1] * 6, every: [2] * 5})
        feed(memory, {some: tokens, none: tokens[:4], every: tokens}, {some: n_kept, none: 0})
        fresh = make(HOST, 4)
        expected = []
        for fed in (tokens[:n_kept], [1] * 6, [2] * 5 + tokens):
            twin = fresh.open()
            for part in (fed[:5], fed[5:]) if fed[:5] == [2] * 5 else (fed,):
                if part:
                    feed(fresh, {twin: part})
            expected.append(feed(fresh, {twin: [4]}))
        found = [feed(memory, {sequence: [4]}) for sequence in (some, none, every)]
        assert [s.length for s in (some, none, every)] == [n_kept + 1, 7, 6 + n_fed]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_plan_that_fails_gives_back_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of the recurrences fails, or there is no room for the second kind of block."""
    memory = make(HOST, 4, budget="12KiB")
    a, b = memory.open(), memory.open()
    feed(memory, {a: [1] * 9, b: [1] * 3})
    before = memory.usage().by_kind
    with monkeypatch.context() as patch:
        patch.setattr(HeadReader, "plan", lambda *_: [][0])
        with pytest.raises(IndexError):
            feed(memory, {a: [1] * 9, memory.fork(b): [2]})
    memory.check()
    assert memory.usage().by_kind == before
    others = [memory.fork(sequence) for sequence in [a, b] * 9]
    with pytest.raises(CapacityError):
        feed(memory, dict.fromkeys(others, [1] * 9))
    memory.check()
    assert memory.usage().by_kind == before


@pytest.mark.parametrize("call", ["usage", "fork", "fork from", "save", "swap", "needs", "horizon", "reorder"])
def test_an_empty_sequence_in_a_new_slot_can_be_asked_anything(call: str, tmp_path: Any) -> None:
    """The table of tails has no column for this slot yet."""
    memory = make(HOST, 4)
    first = memory.open()
    feed(memory, {first: [1] * 9})
    memory.drop(first, 2, 3, approximate=True)
    last = [memory.open() for _ in range(16)][-1]
    if call == "usage":
        assert memory.usage().by_sequence[last.id].total_bytes == memory.counters.held_bytes(last) == 0
    elif call.startswith("fork"):
        assert memory.fork(first if call == "fork" else last).length == (8 if call == "fork" else 0)
    elif call == "save":
        memory.save(last, tmp_path / "empty")
        assert memory.load(tmp_path / "empty").length == 0
    elif call == "swap":
        memory.swap_out(last)
        memory.swap_in(last)
    elif call == "needs":
        counts = np.array([9])
        assert memory.counters.lack_of_room(np.array([last.slot]), counts, 9).needed == memory.needed_bytes(9)
    elif call == "horizon":
        with memory.step({last: [1, 2, 3], first: [1]}) as step:
            HOST(step)
            step.accept({last: 2})
        assert (last.length, first.length) == (2, 9)
    else:
        memory.reorder({last: first, first: last})
        assert (last.length, first.length) == (8, 0)
    memory.check()
