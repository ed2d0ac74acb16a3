"""HybridMemory: attention caches and recurrent states behind one interface, always in step.

The only place that knows that several kinds of memory exist. It owns what must be one: the length of each sequence, the
budget, and the order plan -> begin -> commit or abort in which all kinds move together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from memory.arena import Store, read_budget
from memory.batch import pack, read_requests
from memory.chunks import Model, run_in_chunks
from memory.cross_attention import Encoded
from memory.errors import BatchError, CapacityError, RollbackError, SequenceError, SpecError
from memory.folding import TailGrid
from memory.inspection import Usage, measure, usage_html
from memory.interface import Int64s, Packed, Recurrence, Requests, Sequence
from memory.interrupts import uninterrupted
from memory.kernels import Scoring
from memory.kinds import index_of, make_kinds
from memory.ledger import Ledger
from memory.shift import Dropped, drop_from_all
from memory.specs import MemorySpec
from memory.step import Outputs, Plans, Step

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class HybridMemory:
    """The memory of a model for any number of sequences.

    Args:
        spec: what the model needs remembered: `model.memory_spec`.
        budget: bytes for everything, such as 10**9 or "1GiB". On the CPU, bytes not yet used cost nothing.
        rollback_window: tokens that every sequence can take back, counted from the furthest position it reached. 0 keeps
            no tail: then only position 0, the present and checkpoints can be returned to.
        page_tokens: tokens a page of keys and values.
        fold: how old tokens of recurrent layers leave the tail. "keep" keeps the state each time it passes a multiple of the
            window: nothing is computed, but a sequence holds a third state and a tail of two windows. "replay" runs old rows
            again: a tail of 1.2 windows, and about a tenth to a fifth more time to decode on a CPU. Unless given, "keep" for a
            model on the CPU and "replay" elsewhere.
        device, dtype: the spec's unless given. device="meta" is a dry run: all bookkeeping, no tensors, no model.
        state_dtype: of recurrent states, which models ask for in float32. torch.bfloat16 halves them; each step rounds its end state, so
            outputs drift (`python -m benchmarks states` measures how far).
        poison: for tests: fill fresh and freed memory with NaN.
    Raises:
        SpecError: an option that cannot work, or a budget too small for one sequence.
    """

    def __init__(
        self,
        spec: MemorySpec,
        budget: int | str = "1GiB",
        *,
        rollback_window: int = 32,
        page_tokens: int = 16,
        fold: Literal["keep", "replay"] | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        poison: bool = False,
    ) -> None:
        if not isinstance(spec, MemorySpec):
            raise SpecError(f"{spec!r} is no MemorySpec; pass model.memory_spec")
        for option, value, least in (("rollback_window", rollback_window, 0), ("page_tokens", page_tokens, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise SpecError(f"{option}={value!r}; it must be an integer of at least {least} tokens")
        if fold not in (None, "keep", "replay"):
            raise SpecError(f"fold={fold!r}; choose 'keep', 'replay', or None for what suits the device")
        try:
            place = spec.device if device is None else torch.device(device)
            self.spec = replace(spec.with_state_dtype(state_dtype), device=place, dtype=spec.dtype if dtype is None else dtype)
        except (RuntimeError, TypeError, ValueError) as error:
            raise SpecError(f"device={device!r} is no device; give 'cpu', 'cuda', 'meta' ...") from error
        if self.spec.dtype not in _DTYPES:
            raise SpecError(f"dtype={self.spec.dtype}; it must be one of {', '.join(map(str, _DTYPES))}")
        if state_dtype not in (None, *_DTYPES):
            raise SpecError(f"state_dtype={state_dtype!r}; it must be one of {', '.join(map(str, _DTYPES))}, or None for the model's own")
        self.rollback_window = rollback_window
        self._ledger = Ledger(self)
        self.index = index_of(self.spec)
        # Of the spec's device: a dry run keeps the books of the real thing.
        keeps = spec.device.type == "cpu" if fold is None else fold == "keep"
        budget_bytes = read_budget(budget)
        store = Store(budget_bytes, self.spec.device, poison=poison)
        kinds = make_kinds(self.spec, page_tokens, TailGrid.of(rollback_window, keeps=keeps), store)
        self._arena, self._kinds = store.arena, kinds.by_name
        self._attention, self._cross_attention, self._recurrent = kinds.attention, kinds.cross_attention, kinds.recurrent
        needed = sum(kind.least_bytes for kind in self._kinds.values())
        if needed > budget_bytes:
            raise SpecError(f"a budget of {budget_bytes:,} bytes is too small for one sequence of {spec.model}; give it {needed:,} or more")

    # Sequences

    def open(self, *, encoder: Encoded | None = None) -> Sequence:
        """A new, empty sequence. It holds no bytes until tokens are fed. Cost: O(1).

        Args:
            encoder: of an encoder-decoder model, and only of one: what `model.encode` returned for this sequence's input. It is copied
                into the memory, shared by forks, untouched by rollback, and freed with the last sequence that refers to it.
        Raises:
            BatchError: `encoder` is missing, not wanted, or does not fit the model. CapacityError: no room for it.
        """
        if (encoder is None) != (self._cross_attention is None):
            raise BatchError(
                f"{self.spec.model} has no encoder; open its sequences without encoder="
                if self._cross_attention is None
                else f"{self.spec.model} decodes what its encoder said; give open(encoder=model.encode(...)[i])"
            )
        if self._cross_attention is None or encoder is None:
            return self._ledger.open()
        with uninterrupted():
            sequence = self._ledger.open()
            try:
                self._cross_attention.write(sequence.slot, encoder)
            except BaseException:
                self._ledger.close(sequence)
                raise
        return sequence

    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence that continues from where this one (or this checkpoint) stands.

        Copies no tensor: blocks are shared until one side writes, and then only the last page, the tail and the head are
        copied. Raises SequenceError.
        """
        return self._copy(sequence, is_checkpoint=False)

    def checkpoint(self, sequence: Sequence) -> Sequence:
        """A mark at the sequence's position: `rollback(sequence, to=mark)` returns to it at any distance, until it is closed.

        A mark pins its blocks and nothing else; see `fork`. Raises SequenceError.
        """
        return self._copy(sequence, is_checkpoint=True)

    def _copy(self, sequence: Sequence, *, is_checkpoint: bool) -> Sequence:
        self._ledger.check_usable(sequence, to_advance=False)
        copy = self._ledger.open(lineage=sequence.lineage, is_checkpoint=is_checkpoint)
        self._share([sequence], [copy])
        return copy

    def reorder(self, moves: Mapping[Sequence, Sequence]) -> None:
        """All at once: each key goes on as its value was. For beam search: `reorder({a: b, b: b, c: a})`.

        Copies no tensor. Raises SequenceError or BatchError with nothing changed.
        """
        if not isinstance(moves, Mapping):
            raise BatchError(f"{moves!r} is no reordering; give {{target: source}}")
        for target, source in moves.items():
            self._ledger.check_usable(target)
            self._ledger.check_usable(source, to_advance=False)
        if moves:
            self._share(list(moves.values()), list(moves))

    def _share(self, sources: list[Sequence], targets: list[Sequence]) -> None:
        source_slots, target_slots = (np.array([s.slot for s in group]) for group in (sources, targets))
        with uninterrupted():
            for kind in self._kinds.values():
                kind.share(source_slots, target_slots)
            self._ledger.copy(sources, targets)

    def close(self, sequence: Sequence) -> None:
        """Forget a sequence or a checkpoint; bytes that nobody shares are free at once. Raises SequenceError."""
        self._ledger.check_usable(sequence, to_advance=False)
        with uninterrupted():
            for kind in self._kinds.values():
                kind.release(sequence.slot)
            self._ledger.close(sequence)

    # Going back

    def rollback(self, sequence: Sequence, to: int | Sequence) -> None:
        """Return to an earlier position: later outputs are those of a sequence that never saw the dropped tokens.

        Copies no tensor and runs no layer. Any position from `sequence.horizon` on can be reached, position 0, and whatever
        a checkpoint of the same family holds.

        Args:
            to: tokens to keep, 0 <= to <= length; or a checkpoint of the family: of this sequence, of one it was forked from
                or of a fork. The sequence then goes on as the checkpoint was, whatever it has seen since.
        Raises:
            RollbackError: out of reach; carries .to, .horizon and .resume_at, the nearest reachable position below.
            SequenceError: a bad handle.
        """
        self._ledger.check_usable(sequence)
        if isinstance(to, Sequence):
            self._ledger.check_mark(sequence, to)
            self._share([to], [sequence])
            return
        reached, source = self._nearest(sequence, to)
        if reached != to:
            raise self._out_of_reach(sequence, to, reached)
        with uninterrupted():
            if source is None:
                for kind in self._kinds.values():
                    kind.reset(sequence.slot)
                self._ledger.reset(sequence.slot)
                return
            if source is not sequence:
                self._share([source], [sequence])
            for kind in self._kinds.values():
                kind.truncate(sequence.slot, reached)
            self._ledger.truncate(sequence.slot, reached)

    def _out_of_reach(self, sequence: Sequence, to: int, reached: int) -> RollbackError:
        horizon = self._horizon(sequence)
        why = (
            f"it holds only {reached} tokens"
            if to > reached and reached == self._ledger.lengths[sequence.slot]
            else f"its tail reaches back to {horizon}, and no checkpoint holds {to}. The nearest reachable position is {reached}: "
            f"roll back to it and feed tokens {reached} ... {to - 1} again"
        )
        return RollbackError(f"{sequence!r} cannot return to position {to}: {why}", to=to, horizon=horizon, resume_at=reached)

    def can_rollback(self, sequence: Sequence, to: int | Sequence) -> bool:
        """Whether `rollback(sequence, to)` would succeed now. Raises SequenceError for a bad `sequence`."""
        self._ledger.check_usable(sequence)
        try:
            if isinstance(to, Sequence):
                self._ledger.check_mark(sequence, to)
                return True
            return self._nearest(sequence, to)[0] == to
        except (SequenceError, RollbackError):
            return False

    def resume_point(self, sequence: Sequence, to: int) -> int:
        """The nearest position <= `to` that `rollback` reaches now (the length, if `to` lies beyond it)."""
        self._ledger.check_usable(sequence)
        return self._nearest(sequence, to)[0]

    def _nearest(self, sequence: Sequence, to: int) -> tuple[int, Sequence | None]:
        """The nearest reachable position <= to, and whose blocks hold it: the sequence's own, a checkpoint's, nobody's (0)."""
        length, horizon = int(self._ledger.lengths[sequence.slot]), self._horizon(sequence)
        if isinstance(to, bool) or not isinstance(to, int | np.integer) or to < 0:
            raise RollbackError(f"to={to!r} is no position; give 0 <= to <= {length} or a checkpoint", to=to, horizon=horizon, resume_at=0)
        if to >= horizon:
            return min(int(to), length), sequence
        best: tuple[int, Sequence | None] = (0, None)
        for mark in self._ledger.checkpoints(sequence):
            reach = min(int(to), self._ledger.common_prefix(sequence, mark))
            if reach >= self._horizon(mark) and reach > best[0]:
                best = (reach, mark)
        return best

    def _horizon(self, sequence: Sequence) -> int:
        return max((kind.horizon(sequence.slot) for kind in self._kinds.values()), default=0)

    def drop(self, sequence: Sequence, start: int, end: int, *, approximate: bool = False) -> None:
        """Forget tokens [start, end) of a live sequence and keep those behind them, which move down by end - start: a context shift.

        Attention keeps the rows of the other tokens; keys are turned to their new positions. What the model computed while it saw the
        dropped tokens stays: keys and values of later tokens, in layers above the first, still carry a trace of them, as in llama.cpp.
        Only a range that ends with the sequence leaves none: that is a rollback, where a rollback reaches.
        Rollback, forks and checkpoints work on as ever. Forks and checkpoints of before are untouched.

        Args:
            approximate: recurrent layers cannot forget from the middle: their states hold all tokens in one. False: a model that has any is
                refused. True: they stay as they are, so they go on remembering the dropped tokens while attention does not, and a rollback
                by position reaches no further back than `start`. Without recurrent layers both are the same.
        Raises:
            DropError: no such range; recurrent layers, unless approximate; attention with a policy, or whose spec does not say how keys
                carry positions; a window that would reach back to rows that have left it.
            CapacityError: no room to copy the rows behind `end` before the old ones are freed. SequenceError: a bad handle.
        Cost: those rows are read, turned and written, in every attention layer. No layer of the model runs.
        """
        self._ledger.check_usable(sequence)
        slot = sequence.slot
        length, peak = int(self._ledger.lengths[slot]), int(self._ledger.peaks[slot])
        dropped = Dropped.of(slot, start, end, length, peak, approximate=approximate)
        if dropped.n_tokens and dropped.end == length and self.can_rollback(sequence, dropped.start):
            self.rollback(sequence, dropped.start)
        elif dropped.n_tokens:
            with uninterrupted():
                # Recurrences refuse at once; attention may have much to copy before it does.
                drop_from_all(reversed(self._kinds.values()), dropped, self._arena.free_bytes)
                self._ledger.drop(dropped, dropped.start + (self._recurrent is None))

    # Steps

    def step(self, requests: Requests, *, outputs: Outputs = "last") -> Step:
        """A transaction over new tokens: `with memory.step({alice: ids, bob: 7}) as step: logits = model(step)`.

        Args:
            requests: tokens of each sequence: one id, or a sequence, array or tensor of ids; any mix of lengths.
            outputs: "last" gives one row a request, "all" one row a token; always in the order of `requests`.
        Raises:
            BatchError, SequenceError: here. CapacityError: on entering. Nothing has changed then.
        """
        sequences, tokens = read_requests(requests, self.spec.vocab_size)
        self._ledger.check_all_usable(sequences)
        return Step(self, sequences, tokens, outputs)

    def run(self, model: Model | None, requests: Requests, *, max_tokens: int = 512, outputs: Outputs = "last") -> Tensor | None:
        """Feed requests of any size in steps of at most `max_tokens` tokens: all of them, or none.

        Args:
            model: step -> logits; None in a dry run.
        Returns:
            What one step would have returned: (n_requests, vocab) or (n_tokens, vocab), in the order of `requests`.
        Raises:
            As `step`; whatever the model raises. Every sequence is then as it was before.
        """
        return run_in_chunks(self, model, requests, max_tokens=max_tokens, outputs=outputs)

    def begin_step(self, step: Step) -> None:
        ledger = self._ledger
        slots = ledger.check_all_usable(step.sequences)
        packed = pack(step.tokens, slots, ledger.lengths[slots], ledger.peaks[slots])
        plans: Plans = {}
        free_bytes = self._arena.free_bytes
        with uninterrupted():
            try:
                ledger.reserve(packed)
                for name, kind in self._kinds.items():
                    plans[name] = kind.plan(packed)
                for name, plan in plans.items():
                    self._kinds[name].begin(plan)
            except BaseException as error:
                for name, plan in plans.items():
                    self._kinds[name].abort(plan)
                if isinstance(error, CapacityError):  # what it missed came on top of what this step had taken already
                    needed = error.needed + free_bytes - error.free
                    raise CapacityError.of("the step needs at least", needed, free_bytes) from None
                raise
            ledger.occupy(slots)
            step.hold(packed, plans)

    def commit_step(self, packed: Packed, plans: Plans, kept: Int64s) -> None:
        with uninterrupted():
            for name, plan in plans.items():
                self._kinds[name].commit(plan, kept)
            self._ledger.append(packed, kept)
            self._ledger.vacate(packed.slots)

    def abort_step(self, packed: Packed, plans: Plans) -> None:
        with uninterrupted():
            for name, plan in plans.items():
                self._kinds[name].abort(plan)
            self._ledger.vacate(packed.slots)

    def attend(self, plans: Plans, index: int, q: Tensor, k: Tensor, v: Tensor | None, scoring: Scoring) -> Tensor:
        name, cache, number = self._attention[index]
        return cache.attend(plans[name], number, q, k, v, scoring)

    def cross_attend(self, plans: Plans, index: int, q: Tensor, scoring: Scoring) -> Tensor:
        assert self._cross_attention is not None, "the step has found this memory in the spec"
        return self._cross_attention.cross_attend(plans["cross-attention"], index, q, scoring)

    def recur(self, plans: Plans, index: int, rows: Tensor, recurrence: Recurrence) -> Tensor:
        assert self._recurrent is not None, "the step has found this memory in the spec"
        return self._recurrent.recur(plans["recurrence"], index, rows, recurrence)

    def horizons_after(self, packed: Packed) -> Int64s:
        """(S,) the horizon of each request's sequence once all its tokens are kept."""
        horizons = np.zeros_like(packed.starts)
        for kind in self._kinds.values():
            horizons = np.maximum(horizons, kind.horizon_after(packed))
        return horizons

    # Looking inside

    def describe(self, sequence: Sequence) -> tuple[int, Int64s, int]:
        """(length, tokens, horizon); what a handle's properties show."""
        return int(self._ledger.lengths[sequence.slot]), self._ledger.tokens(sequence.slot), self._horizon(sequence)

    def usage(self) -> Usage:
        """Bytes by kind and by sequence, counted in the arena. Cost: O(blocks in use)."""
        sequences = (
            (handle, int(self._ledger.lengths[slot]), {k: v for kind in self._kinds.values() for k, v in kind.blocks_of(slot).items()})
            for slot, handle in self._ledger.handles.items()
        )
        pools = [pool for kind in self._kinds.values() for pool in kind.sized_pools]
        return measure(self._arena, pools, sequences)

    def check(self) -> None:
        """Compare every book with every other: slots, positions, references, bytes. Raises IntegrityError."""
        self._ledger.check()
        slots = list(self._ledger.handles)
        lengths, peaks = ({slot: int(column[slot]) for slot in slots} for column in (self._ledger.lengths, self._ledger.peaks))
        for kind in self._kinds.values():
            kind.check(lengths, peaks)
        self._arena.check([r for kind in self._kinds.values() for pool, _ in kind.sized_pools for r in pool.used_ranges()])

    def __repr__(self) -> str:
        return f"<HybridMemory for {self.spec.model} on {self.spec.device}: {self.usage()}>"

    def _repr_html_(self) -> str:
        return usage_html(self.usage(), f"HybridMemory for {self.spec.model} on {self.spec.device}")
