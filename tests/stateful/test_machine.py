"""Anything happens in any order: a hybrid memory is compared with plain lists of tokens and an oracle that recomputes.

There are three machines: one keeps all rows, one takes every policy and storage, and one is a bfloat16 model with
weights of 8 bits. By default each runs 20 examples, with `TESTS=long` 50, and with `HYPOTHESIS_PROFILE=long` 1,000.
"""

from __future__ import annotations

import itertools
import tempfile
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridmem.memory import BatchError, CapacityError, HybridMemory, RollbackError, Sequence, SequenceError
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.eviction import Budget
from hybridmem.memory.quantization import Storage
from hybridmem.memory.recurrent_state import RecurrentState
from hybridmem.memory.trees.attention import TreeHostedAttention
from hybridmem.memory.trees.recurrence import TreeRecurrence
from tests.inside import shake
from tests.subjects import POLICIES, STORAGES, Subject, make_subject
from tests.toy import VOCAB, Toy

TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
INDEX = st.integers(0, 1000)


class InjectedError(Exception):
    pass


Parts = tuple[tuple[int, ...], ...]
"""The tokens of a sequence, as they were cut into steps."""


def joined(parts: Parts) -> list[int]:
    return list(itertools.chain(*parts))


def head(parts: Parts, to: int) -> Parts:
    """Return the first tokens, cut into the same steps. What is left of a step that was partly taken back is a step."""
    starts = itertools.accumulate(map(len, parts), initial=0)
    return tuple(part[: to - start] for part, start in zip(parts, starts, strict=False) if start < to)


class Machine(RuleBasedStateMachine):
    """Is a memory that keeps all rows."""

    toy: ClassVar = Toy()

    def __init__(self) -> None:
        super().__init__()
        self.subject = Subject("toy", "keep", self.toy, is_exact=True)
        self.model: dict[Sequence, Parts] = {}
        self.peaks: dict[Sequence, int] = {}
        self.closed: list[Sequence] = []

    @initialize(
        window=st.sampled_from([0, 1, 4, 9]), page_tokens=st.sampled_from([1, 3, 16]),
        kib=st.sampled_from([32, 64, 512]), fold=st.sampled_from(["keep", "replay"]),
        host_kib=st.sampled_from([8, 512]),
    )  # fmt: skip
    def make(self, window: int, page_tokens: int, kib: int, fold: Literal["keep", "replay"], host_kib: int) -> None:
        self.start(HybridMemory(
            self.subject.spec, kib * 1024, rollback_window=window, page_tokens=page_tokens, fold=fold,
            host_pages=host_kib * 1024, poison=True,
        ))  # fmt: skip

    def start(self, memory: HybridMemory) -> None:
        self.memory, self.window = memory, memory.rollback_window
        # Even short examples then have something to go back in, and something that is shared.
        self.open()
        self.step([(0, [i % VOCAB for i in range(25)])], [], None)
        self.fork(0, mark=False)
        self.fork(0, mark=True)

    def recomputed(self, parts: Parts) -> torch.Tensor:
        """Return logits (n, vocab) of a sequence that saw these tokens and nothing else."""
        return self.subject.fresh(self.subject.cut([list(part) for part in parts]), self.window)

    def pick(self, index: int, *, live: bool = True) -> Sequence | None:
        found = [s for s in self.model if not (live and s.is_checkpoint) and not s.is_swapped]
        return found[index % len(found)] if found else None

    @rule()
    def open(self) -> None:
        if len(self.model) < 8:
            sequence = self.memory.open()
            self.model[sequence], self.peaks[sequence] = (), 0

    @rule(
        picks=st.lists(st.tuples(INDEX, TOKENS), min_size=1, max_size=4),
        accept=st.lists(st.floats(0, 1), max_size=4),
        fault=st.sampled_from([None, None, None, "enter", "model", "kernel", "exit"]),
    )
    def step(self, picks: list[tuple[int, list[int]]], accept: list[float], fault: str | None) -> None:
        requests = {s: tokens for i, tokens in picks if (s := self.pick(i))}
        if not requests:
            return
        kept = {s: len(tokens) for s, tokens in requests.items()}
        try:
            with pytest.MonkeyPatch.context() as patch, self.memory.step(requests, outputs="all") as step:
                if fault == "enter":
                    raise InjectedError
                if fault == "kernel":
                    patch.setattr(RecurrentState, "recur", self.fail)
                rows = step.split(self.toy(step))
                if fault == "model":
                    raise InjectedError
                for share, (sequence, tokens) in zip(accept, requests.items(), strict=False):
                    n_kept = round(share * len(tokens))
                    try:
                        step.accept({sequence: n_kept})
                        kept[sequence] = n_kept
                    except RollbackError:
                        assert len(tokens) - n_kept > self.window
                if fault == "exit":
                    raise InjectedError
        except InjectedError:
            return
        except CapacityError:
            return
        for (sequence, tokens), logits in zip(requests.items(), rows, strict=True):
            length, after = sequence.length - kept[sequence], (*self.model[sequence], tuple(tokens))
            self.subject.assert_same(logits, self.recomputed(after)[length:])
            if kept[sequence]:
                self.peaks[sequence] = max(self.peaks[sequence], length + len(tokens))
                self.model[sequence] = head(after, sequence.length)

    @precondition(lambda self: self.takes_trees)
    @rule(
        index=INDEX, nodes=st.lists(st.tuples(INDEX, st.integers(0, VOCAB - 1)), min_size=2, max_size=9),
        turns=st.lists(INDEX, max_size=9), beside=st.tuples(INDEX, TOKENS),
        fault=st.sampled_from([None, None, None, "model", "keep", "kept", "exit"]),
    )  # fmt: skip
    def tree(
        self, index: int, nodes: list[tuple[int, int]], turns: list[int], beside: tuple[int, list[int]],
        fault: str | None,
    ) -> None:  # fmt: skip
        """A tree of tokens, of which one path is kept, beside a chain of another sequence."""
        sequence, other = self.pick(index), self.pick(beside[0])
        if sequence is None or other is None:
            return
        requests = {other: beside[1]} if other is not sequence else {}
        requests[sequence] = [token for _, token in nodes]
        parents = [link % (i + 1) - 1 for i, (link, _) in enumerate(nodes)]
        is_chain = parents == [*range(-1, len(parents) - 1)]
        path, at = list[int](), -1
        for turn in turns:
            if following := [i for i, parent in enumerate(parents) if parent == at]:
                at = following[turn % len(following)]
                path.append(at)
        try:
            with pytest.MonkeyPatch.context() as patch:
                if fault in ("keep", "kept"):
                    patch.setattr(TreeRecurrence if fault == "keep" else TreeHostedAttention, "keep", self.fail)
                with self.memory.step(requests, outputs="all", parents={sequence: parents}) as step:
                    rows = dict(zip(requests, step.split(self.toy(step)), strict=True))
                    if fault == "model":
                        raise InjectedError
                    try:
                        step.accept({sequence: path})
                    except RollbackError:
                        assert is_chain and len(parents) - len(path) > self.window
                        path = [*range(len(parents))]
                        step.accept({sequence: path})
                    if fault == "exit":
                        raise InjectedError
        except (InjectedError, CapacityError):
            return
        except SequenceError:
            assert any(s.is_on_host for s in requests)
            return
        before, length = self.model[sequence], sequence.length - len(path)
        for leaf in sorted({*range(len(parents))} - {*parents}):
            way, node = list[int](), leaf
            while node >= 0:
                way, node = [node, *way], parents[node]
            after = (*before, tuple(requests[sequence][node] for node in way))
            self.subject.assert_same(rows[sequence][way], self.recomputed(after)[length:])
        if path:
            self.model[sequence] = (*before, tuple(requests[sequence][node] for node in path))
            fed = length + len(parents) if is_chain else sequence.length  # Of a tree, only the accepted path counts.
            self.peaks[sequence] = max(self.peaks[sequence], fed)
        if other is not sequence:
            self.model[other] = (*self.model[other], tuple(beside[1]))
            self.peaks[other] = max(self.peaks[other], other.length)
            self.subject.assert_same(rows[other], self.recomputed(self.model[other])[-len(beside[1]) :])

    @property
    def takes_trees(self) -> bool:
        return self.subject.policy is None and self.subject.storage is None

    @staticmethod
    def fail(*_: object) -> None:
        raise InjectedError

    @rule(index=INDEX, fault=st.booleans())
    def fault_on_entering(self, index: int, fault: bool) -> None:
        """Let the copy of a shared block fail while the step is being entered."""
        sequence = self.pick(index)
        if sequence is None:
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "copy", self.fail)
            try:
                with self.memory.step({sequence: [1]}) as step:
                    self.toy(step)
                    raise InjectedError
            except (InjectedError, CapacityError):
                pass

    @rule(index=INDEX, back=st.integers(0, 40))
    def rollback(self, index: int, back: int) -> None:
        sequence = self.pick(index)
        if sequence is None:
            return
        to = max(0, sequence.length - back)
        must = to >= self.peaks[sequence] - self.window or to == 0
        can = self.memory.can_rollback(sequence, to=to)
        assert can or not must
        resume_at = self.memory.resume_point(sequence, to=to)
        assert self.memory.can_rollback(sequence, to=resume_at)
        if not can:
            with pytest.raises(RollbackError) as caught:
                self.memory.rollback(sequence, to=to)
            assert caught.value.resume_at == resume_at < to
            return
        horizon, parts = sequence.horizon, head(self.model[sequence], to)
        marks = [s for s in self.model if s.is_checkpoint and not s.is_swapped and s.length >= to]
        through = [s for s in marks if joined(head(self.model[s], to)) == joined(parts)]
        # The rollback goes through one of these checkpoints. Its furthest position counts from now on.
        if 0 < to < horizon:
            cuts = {self.model[s] for s in through}
            if self.subject.is_lossy and len({head(cut, to) for cut in cuts}) > 1:
                return  # One cannot see here which of them it is.
            parts, self.peaks[sequence] = head(cuts.pop(), to), max(self.peaks[s] for s in through)
        elif to == 0 and horizon > 0:
            self.peaks[sequence] = 0
        self.memory.rollback(sequence, to=to)
        self.model[sequence] = parts

    @rule(index=INDEX, mark=st.booleans(), holds_tail=st.booleans())
    def fork(self, index: int, mark: bool, holds_tail: bool = True) -> None:
        sequence = self.pick(index, live=False)
        if sequence is not None and len(self.model) < 12:
            copy = self.memory.checkpoint(sequence, holds_tail=holds_tail) if mark else self.memory.fork(sequence)
            self.model[copy], self.peaks[copy] = self.model[sequence], self.peaks[sequence]
            if mark and not holds_tail:  # Without a tail, a checkpoint reaches only its own position.
                self.peaks[copy] = max(self.peaks[copy], copy.length + self.window)

    @rule(index=INDEX, mark_index=INDEX)
    def return_to_checkpoint(self, index: int, mark_index: int) -> None:
        sequence, marks = self.pick(index), [s for s in self.model if s.is_checkpoint and not s.is_swapped]
        if sequence is None or not marks:
            return
        mark = marks[mark_index % len(marks)]
        if mark.lineage != sequence.lineage:
            with pytest.raises(SequenceError):
                self.memory.rollback(sequence, to=mark)
            return
        self.memory.rollback(sequence, to=mark)
        self.model[sequence], self.peaks[sequence] = self.model[mark], self.peaks[mark]

    @rule(pairs=st.lists(st.tuples(INDEX, INDEX), max_size=5))
    def reorder(self, pairs: list[tuple[int, int]]) -> None:
        moves = {t: s for a, b in pairs if (t := self.pick(a)) and (s := self.pick(b, live=False))}
        self.memory.reorder(moves)
        self.model |= {t: self.model[s] for t, s in moves.items()}
        self.peaks |= {t: self.peaks[s] for t, s in moves.items()}

    @rule(index=INDEX, there=st.booleans())
    def move(self, index: int, there: bool) -> None:
        sequence = self.pick(index, live=False)
        if sequence is None:
            return
        was_there = sequence.is_on_host
        try:
            (self.memory.to_host if there else self.memory.to_device)(sequence)
            assert sequence.is_on_host == there
        except CapacityError:
            assert sequence.is_on_host == was_there != there

    @rule()
    def move_blocks(self) -> None:
        """Move blocks together, as an allocation does that lacks room."""
        shake(self.memory)

    @rule(index=INDEX)
    def swap_out(self, index: int) -> None:
        sequence = self.pick(index, live=False)
        if sequence is not None:
            self.memory.swap_out(sequence)

    @precondition(lambda self: any(s.is_swapped for s in self.model))
    @rule(index=INDEX)
    def swap_in(self, index: int) -> None:
        away = [s for s in self.model if s.is_swapped]
        try:
            self.memory.swap_in(away[index % len(away)])
        except CapacityError:
            assert away[index % len(away)].is_swapped

    @rule(index=INDEX)
    def save_and_load(self, index: int) -> None:
        sequence = self.pick(index, live=False)
        if sequence is None or len(self.model) >= 12:
            return
        self.memory.save(sequence, "memory://machine/saved")
        try:
            loaded = self.memory.load("memory://machine/saved")
        except CapacityError:
            return
        self.model[loaded], self.peaks[loaded] = self.model[sequence], self.peaks[sequence]

    @rule(index=INDEX)
    def save_and_load_family(self, index: int) -> None:
        sequence = self.pick(index, live=False)
        marks = [s for s in self.model if sequence and s.is_checkpoint and s.lineage == sequence.lineage]
        if sequence is None or len(self.model) + len(marks) >= 12:
            return
        self.memory.save(sequence, "memory://machine/family", checkpoints=True)
        try:
            loaded = self.memory.load("memory://machine/family", family=True)
        except CapacityError:
            return
        saved = [sequence, *sorted(marks, key=lambda mark: mark.id)]
        for one, two in zip(saved, [loaded.sequence, *loaded.checkpoints], strict=True):
            self.model[two], self.peaks[two] = self.model[one], self.peaks[one]

    @precondition(lambda self: self.model)
    @rule(index=INDEX)
    def close(self, index: int) -> None:
        sequence = list(self.model)[index % len(self.model)]
        self.memory.close(sequence)
        del self.model[sequence], self.peaks[sequence]
        self.closed.append(sequence)

    @rule(index=INDEX)
    def misuse(self, index: int) -> None:
        if self.closed:
            with pytest.raises(SequenceError):
                self.memory.step({self.closed[index % len(self.closed)]: [1]})
        sequence = self.pick(index)
        if sequence is not None:
            for bad in ([], [self.subject.spec.vocab_size], [-1], [0.5]):
                with pytest.raises(BatchError):
                    self.memory.step({sequence: bad})  # type: ignore[dict-item]

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.memory.check()
        usage = self.memory.usage()
        assert set(usage.by_sequence) == {s.id for s in self.model}
        assert usage.on_host and set(usage.on_host.by_sequence) == {s.id for s in self.model if s.is_on_host}
        assert sum(usage.on_host.by_kind.values()) == usage.on_host.used_bytes
        assert sum(usage.by_kind.values()) == usage.used_bytes
        for sequence, parts in self.model.items():
            assert sequence.tokens.tolist() == joined(parts)
            assert sequence.horizon <= max(0, self.peaks[sequence] - self.window)

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            for sequence in list(self.model):
                self.memory.close(sequence)
            self.memory.check()
            usage = self.memory.usage()
            assert usage.on_host and usage.used_bytes == usage.host_bytes == usage.on_host.used_bytes == 0


class LossyMachine(Machine):
    """Is a memory with a policy, a storage or both. The oracle reads the tokens in the same steps."""

    @initialize(
        policy=st.sampled_from([None, *POLICIES.values()]), storage=st.sampled_from([None, *STORAGES.values()]),
        window=st.sampled_from([0, 1, 4, 9]), fold=st.sampled_from(["keep", "replay"]),
    )  # fmt: skip
    def make(  # type: ignore[override]
        self, policy: Budget | None, storage: Storage | None, window: int, fold: Literal["keep", "replay"]
    ) -> None:
        self.subject = Subject("toy", fold, self.toy, is_exact=fold == "keep", policy=policy, storage=storage)
        self.start(HybridMemory(
            self.subject.spec, 512 * 1024, rollback_window=window, page_tokens=4, fold=fold, host_pages=512 * 1024,
            poison=True,
        ))  # fmt: skip


@cache
def rounded_jamba() -> Subject:
    """Return a Jamba with rows of bfloat16 and weights of 8 bits."""
    with tempfile.TemporaryDirectory() as folder:
        return make_subject("jamba int8", Path(folder), dtype=torch.bfloat16)


class RoundedMachine(Machine):
    """Is a memory of all rows, for a model with rows of 16 bits and weights of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.subject = rounded_jamba()
        self.toy = self.subject.model  # type: ignore[misc]

    @property
    def takes_trees(self) -> bool:
        return False  # How many rows are multiplied at once changes the rounding of 8 bits.

    def recomputed(self, parts: Parts) -> torch.Tensor:
        """Recompute in the same steps.

        The number of rows in a product changes how 8 bits round, and the error grows.
        """
        return self.subject.fresh([list(part) for part in parts], self.window)

    @initialize(
        window=st.sampled_from([0, 4, 9]), kib=st.sampled_from([128, 1024]), fold=st.sampled_from(["keep", "replay"])
    )
    def make(self, window: int, kib: int, fold: Literal["keep", "replay"]) -> None:  # type: ignore[override]
        self.start(HybridMemory(
            self.subject.spec, kib * 1024, rollback_window=window, page_tokens=4, fold=fold, host_pages=512 * 1024,
            poison=True,
        ))  # fmt: skip


TestMachine, TestLossyMachine, TestRoundedMachine = Machine.TestCase, LossyMachine.TestCase, RoundedMachine.TestCase
TestRoundedMachine.settings = settings(max_examples=max(3, settings.default.max_examples // 10))
