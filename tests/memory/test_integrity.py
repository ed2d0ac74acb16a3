"""`check()` finds whichever entry of the books is spoiled, and names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybridmem.memory import HybridMemory, IntegrityError, Sequence
from tests.inside import books, layer_memories, store_of
from tests.toy import Toy

BODY_AT, HEAD_AT, KEPT_AT, OFFSET, FLOOR, BODY, HEAD, KEPT, TAIL = range(9)


class Books:
    """Holds a memory with a folded sequence, a fork of it and a checkpoint, and what its books say."""

    def __init__(self) -> None:
        spec = Toy(window=5, device=torch.device("meta")).memory_spec
        self.memory = HybridMemory(spec, "1MiB", rollback_window=4, page_tokens=4, fold="keep")
        self.sequence: Sequence = self.memory.open()
        self.memory.run(None, {self.sequence: [i % 10 for i in range(40)]})
        self.mark, self.fork = self.memory.checkpoint(self.sequence), self.memory.fork(self.sequence)
        self.memory.run(None, {self.fork: [1, 2, 3]})
        self.memory.check()
        self.columns, self.slot = books(self.memory), self.sequence.slot
        ((self.states, _), _) = layer_memories(self.memory)["recurrence"].pools
        self.pages = next(pool for layers in layer_memories(self.memory).values() for pool, _ in layers.pools)

    def state(self, row: int, value: int) -> None:
        self.columns["states"][row, self.slot] = value

    @property
    def free_slot(self) -> int:
        slot: int = self.columns["free slots"][-1]
        return slot

    def buffer(self) -> Any:
        return self.columns["buffers"][self.slot]


SPOILED: dict[str, tuple[Callable[[Books], Any], str]] = {
    "a slot that nobody has": (lambda b: b.columns["free slots"].pop(), "lost"),
    "a slot twice": (lambda b: b.columns["free slots"].append(b.slot), "lost, or used and free"),
    "no buffer of a checkpoint": (lambda b: b.columns["buffers"][b.mark.slot].checkpoints.clear(), "held by others"),
    "a writer that others go beyond": (
        lambda b: setattr(b.columns["buffers"][b.slot], "writer", b.fork.slot), "may overwrite|may write",
    ),
    "a family without its checkpoints": (lambda b: b.columns["families"].clear(), "cannot be found"),
    "a family of others": (lambda b: b.columns["families"].update({77: {b.buffer(): None}}), "cannot be found"),
    "a length in a free slot": (lambda b: b.columns["lengths"].__setitem__(b.free_slot, 1), "a free slot"),
    "a free slot in a step": (lambda b: b.columns["busy"].__setitem__(b.free_slot, True), "a free slot"),
    "a free slot that is away": (lambda b: b.columns["away"].__setitem__(b.free_slot, True), "a free slot"),
    "drops in a free slot": (lambda b: b.columns["seams"].update({b.free_slot: ((1, 1),)}), "a free slot"),
    "a handle of another slot": (lambda b: setattr(b.sequence, "slot", b.fork.slot), "contradicts itself"),
    "a handle that is closed": (lambda b: setattr(b.sequence, "closed", True), "contradicts itself"),
    "a peak before the end": (lambda b: b.columns["peaks"].__setitem__(b.slot, 39), "contradicts itself"),
    "no tokens": (lambda b: b.columns["buffers"].pop(b.slot), "contradicts itself"),
    "a buffer that others hold": (lambda b: b.buffer().live.add(b.fork.slot), "held by others"),
    "a writer that nobody is": (lambda b: setattr(b.buffer(), "writer", b.free_slot), "may overwrite"),
    "a place to write of a checkpoint": (
        lambda b: b.columns["writable"].__setitem__(b.mark.slot, b.columns["writable"][b.slot]), "may write",
    ),
    "room for tokens of no step": (lambda b: b.columns["reserved"].update({b.slot: None}), "reserved for no step"),
    "a body that is not there": (lambda b: b.state(BODY, -1), "body"),
    "a body elsewhere": (lambda b: b.state(BODY_AT, 1), "its body at 1"),
    "no tail": (lambda b: b.state(TAIL, -1), "cannot hold rows"),
    "a head ahead of its sequence": (lambda b: b.state(HEAD_AT, 41), "head"),
    "a head that is not there": (lambda b: (b.state(HEAD_AT, 40), b.state(HEAD, -1)), "head -1"),
    "a kept state at no fold point": (lambda b: (b.state(KEPT, 0), b.state(KEPT_AT, 39)), "kept for 39"),
    "a kept state of no position": (lambda b: (b.state(KEPT, 0), b.state(KEPT_AT, -1)), "kept for -1"),
    "a kept state where the body is": (lambda b: b.state(KEPT_AT, 36), "kept for 36"),
    "a kept state ahead of its sequence": (lambda b: b.state(KEPT_AT, 44), "kept for 44"),
    "a kept state that is not there": (lambda b: b.state(KEPT, -1), "state -1 kept for 40"),
    "dropped tokens, and states from nowhere": (lambda b: b.state(OFFSET, 4), "states from 0 on"),
    "states from behind the end": (lambda b: b.state(FLOOR, 41), "states from 41 on"),
    "states ahead of a slot that is closed": (
        lambda b: b.columns["states"].__setitem__((OFFSET, b.free_slot), 3), "ahead of them",
    ),
    "states of a slot that is closed": (
        lambda b: b.columns["states"].__setitem__((BODY, b.columns["free slots"][-1]), 0), "not open",
    ),
    "a block that does not exist": (lambda b: b.state(HEAD, 10_000), "are held"),
    "a free byte that is none": (
        lambda b: setattr(store_of(b.memory).arena, "free_bytes", b.memory.free_bytes - 64), "free bytes",
    ),
    "a count of blocks in use": (lambda b: setattr(b.pages, "n_used", b.pages.n_used + 1), "in use"),
    "a page too many": (lambda b: b.columns["oldest"].__setitem__(b.slot, 40), "rows from"),
    "rows from before the first": (lambda b: b.columns["oldest"].__setitem__(b.slot, -1), "rows from -1"),
    "a page that has not left the window": (
        lambda b: b.columns["first page"].__setitem__(b.slot, 9), "holds pages from 9 on",
    ),
    "a page that left the window": (lambda b: b.columns["first page"].__setitem__(b.slot, 7), "holds pages from 7 on"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_spoiled_is_found(name: str) -> None:
    spoil, says = SPOILED[name]
    own = Books()
    spoil(own)
    with pytest.raises(IntegrityError, match=says):
        own.memory.check()


@pytest.mark.parametrize(
    "length, peak, n_found", [(40, 40, 0), (35, 40, 3), (41, 40, 3), (44, 44, 3), (40, 44, 2), (40, 39, 2)]
)
def test_each_kind_compares_lengths_with_what_it_holds(length: int, peak: int, n_found: int) -> None:
    """If no page ever leaves, pages do not depend on the peak."""
    own = Books()
    found = 0
    for layers in layer_memories(own.memory).values():
        try:
            layers.check({own.slot: length}, {own.slot: peak}, is_all=False)
        except IntegrityError as error:
            assert f"slot {own.slot} h" in str(error)
            found += 1
    assert found == n_found


@pytest.mark.parametrize("window", [0, 4])
def test_nothing_is_found_where_nothing_is_wrong(window: int) -> None:
    """Sequences have no token, no body, or are as far back as possible.

    Others are in a step, or have dropped tokens.
    """
    model = Toy(attention=False)
    memory = HybridMemory(model.memory_spec, "1MiB", rollback_window=window)
    first, empty = memory.open(), memory.open()
    for n_tokens in (0, 1, window, 2 * window + 1, 30):
        if n_tokens:
            memory.run(model, {first: [1] * n_tokens})
        memory.check()
    fork = memory.fork(first)
    with memory.step({fork: [1, 2], empty: [3], memory.open(): [4] * 9}) as step:
        memory.check()
        model(step)
    memory.check()
    for sequence in (fork, first):
        memory.rollback(sequence, to=sequence.horizon)
        memory.check()
    for start in (0, first.length - 4):  # From position 1 on there are states. The second run begins near the end.
        memory.drop(first, start, start + 2, approximate=True)
        memory.check()
        memory.rollback(first, to=first.horizon)
        memory.check()
