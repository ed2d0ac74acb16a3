"""HybridMemory: attention caches and recurrent states behind one interface, always in step.

The only place that knows that several kinds of memory exist. It owns what must be one: the length of each sequence, the
budget, and the order plan -> begin -> commit or abort in which all kinds move together.
"""

from __future__ import annotations

from dataclasses import replace
from html import escape
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from memory.archive import check_layout, describe_layout, read_path, read_snapshot, write_snapshot
from memory.arena import Store, read_budget
from memory.arguments import check_usable, read_count, read_device, read_dtype
from memory.batch import count_tokens, pack, read_pairs, read_tokens
from memory.blocks.arrays import Int64s
from memory.chunks import Model, run_in_chunks
from memory.cross_attention import Encoded
from memory.errors import BUDGET_UNIT, BatchError, CapacityError, FormatError, SequenceError, SpecError
from memory.folding import Fold, TailRules
from memory.host_bytes import HostAttention, host_store
from memory.inspection import Usage, measure
from memory.interface import OpenStep, Packed, Plans, Requests, Sequence
from memory.interrupts import uninterrupted, uninterrupted_call
from memory.kernels import OF_STATES, Scoring, chosen_kernels
from memory.kinds import default_fold, index_of, make_kinds, with_host_pages
from memory.specs import MemorySpec, RecurrentSpec
from memory.state.access import Recurrence
from memory.step import Outputs, Step
from memory.tiers import Tiers
from memory.timelines import Timelines, Whole
from memory.together import Snapshot
from memory.uploads import together

_MANY_TOKENS = 4096
"""In a step: reading them, and planning for them, takes longer than to ask whether they can fit."""


class HybridMemory(Timelines):
    """The memory of a model for any number of sequences.

    Args:
        spec: what the model needs remembered: `model.memory_spec`.
        budget: bytes for everything, such as 10**9, "1GiB" (2**30) or "1GB" (10**9). On the CPU, bytes not yet used cost nothing.
        rollback_window: tokens that every sequence can take back, counted from the furthest position it reached. 0 keeps
            no tail: then only position 0, the present and checkpoints can be returned to.
        page_tokens: tokens a page of keys and values.
        fold: how old tokens of recurrent layers leave the tail. "keep" keeps the state each time it passes a multiple of the
            window: nothing is computed, but a sequence holds a third state and a tail of two windows. "replay" runs old rows
            again: a tail of 1.2 windows, and about a tenth to a fifth more time to decode on a CPU. "defer" writes states only then, and
            each step reads body and tail: a tail of 1.5 windows of what tokens did, no state at the newest position; for all but RWKV-4
            and RG-LRU. Unless given, "keep" for a model on the CPU, on a CUDA device "defer" where all recurrences can and so move
            fewer bytes (SSD, gated delta rules, linear attention; others with small windows), and else "replay".
        device, dtype: the spec's unless given, or their names. device="meta" is a dry run: all bookkeeping, no tensors, no model.
        state_dtype: of recurrent states, which models ask for in float32. "bfloat16" halves them; each step rounds its end state, so
            outputs drift (`python -m benchmarks states` measures how far).
        host_pages: for `to_host`: bytes of keys and values that may be in host memory, beside the budget; a CUDA device's memory pins them
            all at once. None: there is no such place.
        host_attention: who attends to them on a CUDA device. "stream": the device, which reads them over the bus; the host never waits.
            "compute": the host's processor, to which the device sends queries, keys and values, and which waits for them in each attention
            layer, as the device then does for what it found; results differ by rounding. On the CPU both are the same.
        host_budget, swap_dir: for `swap_out`: bytes that may wait in host memory (None: any number), and the folder where those go that
            find no room there (None: nowhere); one of this process alone, for what killed processes left there is removed.
        poison: for tests: fill fresh and freed memory with NaN.
    Attributes:
        spec, rollback_window, page_tokens, fold: what it goes by, defaults filled in; to be read, not set. A memory made with these has
            blocks of the same sizes.
    Raises:
        SpecError: an option that cannot work, or a budget too small for one sequence.
    """

    def __init__(
        self,
        spec: MemorySpec,
        budget: float | str = "1GiB",
        *,
        rollback_window: int = 32,
        page_tokens: int = 16,
        fold: Fold | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        state_dtype: str | torch.dtype | None = None,
        host_pages: float | str | None = None,
        host_attention: HostAttention = "stream",
        host_budget: float | str | None = None,
        swap_dir: str | Path | None = None,
        poison: bool = False,
    ) -> None:
        if not isinstance(spec, MemorySpec):
            raise SpecError(f"{spec!r} is no MemorySpec; pass model.memory_spec")
        rollback_window = read_count("rollback_window", rollback_window, 0, "tokens")
        page_tokens = read_count("page_tokens", page_tokens, 1, "tokens")
        if fold not in (None, *get_args(Fold)):
            raise SpecError(f"fold={fold!r}; choose 'keep', 'replay', 'defer', or None for what suits the device")
        if host_attention not in get_args(HostAttention) or (host_attention == "compute" and host_pages is None):
            raise SpecError(f"host_attention={host_attention!r}; choose 'stream' or 'compute', and say how many bytes with host_pages=")
        place = spec.device if device is None else read_device("device", device)
        check_usable("device", place)
        of_rows = spec.dtype if dtype is None else read_dtype("dtype", dtype)
        self.spec = replace(spec.with_state_dtype(state_dtype), device=place, dtype=of_rows)
        self.rollback_window = rollback_window
        self.page_tokens = page_tokens
        # Of the spec's device: a dry run keeps the books of the real thing.
        self.fold: Fold = fold or default_fold(self.spec, spec.device.type, rollback_window)
        self.index = index_of(self.spec)
        rules = TailRules.of(self.fold, rollback_window)
        budget_bytes = read_budget(budget)
        host_bytes = None if host_budget is None else read_budget(host_budget, "host_budget")
        store = Store(budget_bytes, self.spec.device, poison=poison)
        self._tiers = Tiers(host_bytes, None if swap_dir is None else Path(read_path("swap_dir", swap_dir, "a folder")))
        self._layout = describe_layout(self.spec, page_tokens, rules)
        kinds = make_kinds(self.spec, page_tokens, rules, store)
        host = None
        if host_pages is not None:
            pinned = host_store(read_budget(host_pages, "host_pages"), self.spec.device, host_attention, poison=poison)
            host = with_host_pages(kinds, self.spec, page_tokens, rules, store, pinned)
        super().__init__(kinds.by_name, store, has_states=kinds.recurrent is not None, host_pages=host)
        self._attention, self._cross_attention, self._recurrent = kinds.attention, kinds.cross_attention, kinds.recurrent
        if (needed := self._kinds.least_bytes) > budget_bytes:
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
        cross_attention = self._cross_attention
        with uninterrupted_call() as held:
            sequence = self._ledger.open()
            try:
                self._with_room(lambda: cross_attention.write(sequence.slot, encoder))
                held.deliver()
            except BaseException:
                self._withdraw(sequence)
                raise
            return sequence

    def close(self, sequence: Sequence | Whole = Whole.MEMORY) -> None:
        """Forget a sequence or a checkpoint; bytes that nobody shares are free at once. Without an argument, close the whole memory.

        The bytes of a closed memory, and the files of what was swapped out, go at once. Every later use of it or of its handles raises
        SequenceError; closing it again does nothing. `with HybridMemory(...) as memory:` closes it at the end.

        Raises SequenceError: a bad handle, or one in an open step; then nothing has changed.
        """
        if sequence is Whole.MEMORY:
            self._close_all()
            return
        self._ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        with uninterrupted():
            self._kinds.release(sequence.slot)
            self._ledger.close(sequence)
            self._tiers.drop(sequence.slot)  # last: a file system may refuse

    # Into host memory and back

    def to_host(self, sequence: Sequence) -> None:
        """Move keys and values of a sequence or a checkpoint into host memory (`host_pages`), where attention finds them from now on.

        It can be used as ever, in steps with others as well. What recurrences remember stays on the device, as does what an encoder said.
        Forks and checkpoints that are taken of it from now on have their keys and values there too, and share them. What it shares already
        is copied as well and stays with the others. A sequence that is empty begins there. `rollback` to a checkpoint leads to where that
        is, `reorder` to where the source is, `swap_in` and `load` to the device. Nothing happens if it is there.

        Raises:
            CapacityError: no room there (`.unit` says of which memory). SequenceError: a bad handle. SpecError: no `host_pages`.
        Cost: the bytes of its keys and values, copied once.
        """
        self._move(sequence, to_host=True)

    def to_device(self, sequence: Sequence) -> None:
        """Move them back, bit for bit as they are. Raises as `to_host`; CapacityError: no room in the budget."""
        self._move(sequence, to_host=False)

    def _move(self, sequence: Sequence, *, to_host: bool) -> None:
        self._ledger.check_usable(sequence, to_advance=False)
        if self._host_pages is None:
            raise SpecError('this memory has no place for pages in host memory; make it with host_pages="8GiB", say')
        move, slot = self._host_pages.move, sequence.slot
        with uninterrupted():
            self._with_room(lambda: move(slot, to_host=to_host))

    # Out of the budget and back

    def swap_out(self, sequence: Sequence) -> None:
        """Give a sequence's or a checkpoint's bytes back while it waits: into host memory, then into files (`host_budget`, `swap_dir`).

        Its handle stays good for its length and tokens, for `save`, `swap_in` and `close`, and for nothing else until it is back. What it
        shares with others is copied as well and stays with them; when it is back, it shares nothing.

        Raises:
            CapacityError: no room there. SequenceError: a bad handle.
        Cost: its bytes, copied once.
        """
        self._ledger.check_usable(sequence, to_advance=False)
        with uninterrupted():
            snapshot = self._snapshot(sequence.slot)
            self._tiers.put(sequence.slot, snapshot)
            self._ledger.send_away(sequence.slot, self._kinds.horizon(sequence.slot), snapshot.n_bytes)
            self._kinds.release(sequence.slot)

    def swap_in(self, sequence: Sequence) -> None:
        """Bring a sequence back, bit for bit as it was. Raises CapacityError, or FormatError if its file was damaged: it waits on then."""
        self._ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        if not self._ledger.is_away[sequence.slot]:
            raise SequenceError(f"{sequence!r} is not swapped out; it can be used as it is")
        with uninterrupted():
            snapshot = self._tiers.get(sequence.slot)
            self._with_room(lambda: self._kinds.restore(sequence.slot, snapshot, self._store))
            self._tiers.drop(sequence.slot)
            self._ledger.bring_back(sequence.slot)

    def save(self, sequence: Sequence, path: str | Path) -> None:
        """Write all that is remembered of a sequence or a checkpoint to a file, which `load` reads in any process.

        Args:
            path: as fsspec reads it, so it may be a URL. A file there is replaced when the new one is complete, and not before; on a local
                disk only its owner can read it (mode 0600), whoever could read the old one.
        Raises:
            SequenceError: a bad handle. SpecError: a dry run, or a path that can be no file. OSError: from the file system.
        Cost: its bytes, copied, hashed and written.
        """
        self._ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        slot, place = sequence.slot, read_path("path", path, "the path of a file, such as 'alice.safetensors'")
        snapshot = self._tiers.get(slot) if self._ledger.is_away[slot] else self._snapshot(slot)
        write_snapshot(place, snapshot, {"layout": self._layout, "model": self.spec.model, **self._ledger.record(slot)})

    def load(self, path: str | Path) -> Sequence:
        """A new sequence that goes on, bit for bit, where the saved one stood.

        Forks and checkpoints of the saved one are not in its file. The memory must be like the one that wrote it: the same model,
        policies, dtypes, rollback_window, fold and page_tokens; weights are not compared.

        Raises:
            FormatError: no such file, or a damaged, foreign or unsuitable one; nothing has changed. CapacityError.
        """
        place = read_path("path", path, "the path of a saved sequence", FormatError)
        snapshot, about = read_snapshot(place)
        check_layout(place, about, self._layout)
        with uninterrupted_call() as held:
            sequence = self._ledger.open()
            try:
                self._with_room(lambda: self._kinds.restore(sequence.slot, snapshot, self._store))
                self._ledger.restore(sequence.slot, about, self.spec.vocab_size)
                self._check_slot(sequence.slot)
                held.deliver()
            except BaseException as error:
                self._withdraw(sequence)
                if isinstance(error, CapacityError) or not isinstance(error, Exception):
                    raise
                # Its checksum is right, so it was written like this: by another program, or to do harm.
                raise FormatError(f"{path} contradicts itself ({error}); save the sequence again") from error
            return sequence

    def _snapshot(self, slot: int) -> Snapshot:
        length = int(self._ledger.lengths[slot])
        snapshot = self._kinds.snapshot(slot, length, self._store)
        if self._host_pages is None:
            return snapshot
        return replace(snapshot, blocks=snapshot.blocks | self._host_pages.snapshot(slot, length).blocks)

    # Steps

    def step(self, requests: Requests, *, outputs: Outputs = "last") -> Step:
        """A transaction over new tokens: `with memory.step({alice: ids, bob: 7}) as step: logits = model(step)`.

        Args:
            requests: tokens of each sequence: one id, or a sequence, array or tensor of ids; any mix of lengths. If all are tensors on
                a CUDA device, such as `zip(sequences, logits.argmax(-1))`, the host does not wait for them before it leaves the step: it
                plans a step while the device computes the one before.
            outputs: "last" gives one row a request, "all" one row a token; always in the order of `requests`.
        Raises:
            BatchError, SequenceError: here, or for tokens that were on the device on leaving. CapacityError: on entering, or here for
            thousands of tokens that the budget could never hold. Nothing has changed then.
        """
        sequences, values = read_pairs(requests)
        if set(map(type, values)) != {int} and (counts := count_tokens(values)).sum() > _MANY_TOKENS:
            need = self._need(self._ledger.check_all_usable(sequences), counts, int(counts.sum()))
            if need.total_bytes > self.budget_bytes:
                raise need.refusal(self.budget_bytes, self.free_bytes)
        tokens = read_tokens(sequences, values, self.spec.vocab_size)
        self._ledger.check_all_usable(sequences)
        return Step(self, sequences, tokens, outputs)

    def run(self, model: Model | None, requests: Requests, *, max_tokens: int = 512, outputs: Outputs = "last") -> Tensor | None:
        """Feed requests of any size in steps of at most `max_tokens` tokens: all of them, or none.

        Args:
            model: step -> logits; None in a dry run.
        Returns:
            What one step would have returned: (n_requests, vocab) or (n_tokens, vocab), in the order of `requests`.
        Raises:
            As `step`, and CapacityError before anything is computed: it names the bytes that the whole run needs. Whatever the model
            raises, or a Ctrl-C. Every sequence is then as it was before. A Ctrl-C that comes when the last step commits is raised after
            this has returned.
        """
        held = uninterrupted_call()  # until this returns, once the last step commits
        return run_in_chunks(self, model, requests, max_tokens=max_tokens, outputs=outputs, held=held)

    def begin_step(self, step: Step) -> None:
        ledger = self._ledger
        slots = ledger.check_all_usable(step.sequences)
        packed = pack(step.tokens, slots, ledger.lengths[slots], ledger.peaks[slots])
        with uninterrupted(), together(self._store.stages) as stage:
            plans = self._with_room(lambda: self._begin(packed))
            opened = OpenStep(packed, plans, stage, step.block)
            self._open_steps[opened] = None
            ledger.occupy(slots)
            step.hold(opened, self._store.upload)
            ledger.reserve(packed)  # last: a step that is refused leaves no larger buffers behind

    def _begin(self, packed: Packed) -> Plans:
        try:
            return self._kinds.begin(packed, self.free_bytes)
        except CapacityError as error:
            if error.unit == BUDGET_UNIT:  # those kinds that did not come to plan want room as well
                raise self.lack_of_room(packed.slots, packed.counts, len(packed.token_ids), least_bytes=error.needed) from None
            raise

    def commit_step(self, opened: OpenStep, kept: Int64s) -> None:
        with uninterrupted():
            try:
                self._kinds.commit(opened.plans, kept)
                self._ledger.append(opened.packed, kept)
            finally:
                self._settle(opened)

    def attend(self, plans: Plans, index: int, q: Tensor, k: Tensor, v: Tensor | None, scoring: Scoring) -> Tensor:
        name, cache, number = self._attention[index]
        return cache.attend(plans[name], number, q, k, v, scoring)

    def cross_attend(self, plans: Plans, index: int, q: Tensor, scoring: Scoring) -> Tensor:
        assert self._cross_attention is not None, "the step has found this memory in the spec"
        return self._cross_attention.cross_attend(plans["cross-attention"], index, q, scoring)

    def recur(self, plans: Plans, index: int, rows: Tensor, recurrence: Recurrence) -> Tensor:
        assert self._recurrent is not None, "the step has found this memory in the spec"
        return self._recurrent.recur(plans["recurrence"], index, rows, recurrence)

    # Looking inside

    def held_bytes(self, sequence: Sequence) -> int:
        """Bytes of the budget that a sequence or a checkpoint refers to, shared with others or not. Raises SequenceError."""
        self._ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        return self._kinds.held_bytes(sequence.slot)

    def usage(self) -> Usage:
        """Bytes by kind, by layers, by part and by sequence, counted in the arena. Print it. Cost: O(blocks in use)."""
        self.abort_abandoned()
        return measure(self.inventory(), self._tiers.used_bytes, self.host_inventory())

    def kernels(self) -> dict[str, str]:
        """Which kernels compute what here: function -> set, as `memory.kernels.chosen_kernels` says of this memory's device and dtypes."""
        recurrent = [memory for _, memory in self.spec.of_kind("recurrence") if isinstance(memory, RecurrentSpec)]
        states = (state.dtype or self.spec.dtype for memory in recurrent for state in memory.states)
        device, dtype = self.spec.device, self.spec.dtype
        of_states = chosen_kernels(device, dtype, *states, behind_tails=self.fold == "defer" and self.rollback_window > 0)
        return chosen_kernels(device, dtype) | {name: of_states[name] for name in OF_STATES}

    def _check_slot(self, slot: int) -> None:
        """Compare what the books say of one slot. Raises IntegrityError."""
        self._ledger.check_slot(slot)
        self._kinds.check_slot(slot, int(self._ledger.lengths[slot]), int(self._ledger.peaks[slot]))

    def check(self) -> None:
        """Compare every book with every other: slots, positions, references, bytes. Raises IntegrityError."""
        self.abort_abandoned()
        self._ledger.check()
        slots = [slot for slot in self._ledger.handles if not self._ledger.is_away[slot]]
        lengths, peaks = ({slot: int(column[slot]) for slot in slots} for column in (self._ledger.lengths, self._ledger.peaks))
        self._kinds.check(lengths, peaks, self._store)
        if self._host_pages is not None:
            self._host_pages.check(slots)

    def __repr__(self) -> str:
        return f"<HybridMemory for {self.spec.model} on {self.spec.device}: {self._why_ended or self.usage().summary}>"

    def _repr_html_(self) -> str:
        if self._why_ended:
            return escape(repr(self))
        return self.usage().html(f"HybridMemory for {self.spec.model} on {self.spec.device}")
