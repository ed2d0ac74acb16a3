"""`HybridMemory` puts attention caches and recurrent states behind one interface, always in step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, overload

import torch
from torch import Tensor

from hybridmem.memory.blocks.arguments import read_count
from hybridmem.memory.blocks.copying import refuse_to_copy
from hybridmem.memory.blocks.hints import refuse_arguments, refuse_attribute
from hybridmem.memory.blocks.pinned import HostAttention
from hybridmem.memory.build import build, check_choices, default_fold, kernels_of, resolved_spec
from hybridmem.memory.chunked_prefill import Model, run_in_chunks
from hybridmem.memory.coordinator import Coordinator
from hybridmem.memory.errors import SequenceError, SpecError
from hybridmem.memory.interface import Encoded, Requests, Sequence
from hybridmem.memory.sequences.batch import read_pairs, read_tokens
from hybridmem.memory.sequences.folding import Fold, TailRules
from hybridmem.memory.sequences.interrupts import uninterrupted_call
from hybridmem.memory.specs import MemorySpec
from hybridmem.memory.step import Outputs, Step
from hybridmem.memory.storage.archive import NO_FORKS, Archive, Checkpoints, Family, Forks
from hybridmem.memory.storage.folders import Folders
from hybridmem.memory.storage.swapping import Swapping
from hybridmem.memory.views.counters import Counters
from hybridmem.memory.views.usage import Usage

_NOT_GIVEN: Any = object()


class HybridMemory:
    """Holds what a model remembers of any number of sequences: keys, values and recurrent states, in one budget.

    Args:
        spec: what the model's layers remember: `model.memory_spec`.
        budget: bytes for everything: 10**9, "1GiB" (2**30) or "1GB" (10**9). On the CPU, unused ones cost nothing.
        rollback_window: tokens that every sequence can take back, counted from its peak, the furthest position that it
            reached. 0 keeps no tail: then a rollback reaches only position 0, the present and checkpoints.
        page_tokens: tokens a page of keys and values.
        fold: how old tokens of recurrent layers leave the tail. "keep" keeps the state at each multiple of the window:
            nothing is computed, but a sequence holds a third state and a tail of two windows. "replay" runs old rows
            again: a tail of 1.2 windows, and a tenth to a fifth more time to decode on a CPU. "defer" writes a state
            only when rows fold, and each step computes the newest state again, from body and tail: a tail of 1.5
            windows of what tokens did to states. All recurrences but RWKV-4 and RG-LRU can do that. Unless given: on
            the CPU "keep"; on CUDA "defer" where all recurrences can and it moves fewer bytes (SSD, gated delta rules,
            linear attention; others with small windows), else "replay".
        device, dtype: the spec's unless given. device="meta" is a dry run: all bookkeeping, no tensors, no model.
        state_dtype: of recurrent states, which models have in float32. "bfloat16" halves them, but each step rounds its
            end state, so outputs drift (`python -m benchmarks states` measures how far).
        host_pages: bytes of host memory, beside the budget, for the keys and values that `to_host` moves; for a CUDA
            device all are pinned at once. None: there is no such place.
        host_attention: what attends to them where the device is CUDA. "stream": the device reads them over the bus; the
            host never waits. "compute": the host's processor; in each attention layer it waits for queries, keys and
            values, and the device for its results, which differ by rounding. On the CPU both are the same.
        host_budget, swap_dir, disk_budget: bytes of host memory for what `swap_out` moves (None: no limit), a folder
            or fsspec's URL of one for what does not fit there (None: none), and bytes of its files (None: no limit).
            In a local folder, files of killed processes are removed.
        poison: for tests: fill fresh and freed memory with NaN.
    Attributes:
        spec, rollback_window, page_tokens, fold: options, defaults filled in. Memories with the same ones are alike.
        budget_bytes: what it may use at most; see `budget`.
        counters: counts bytes, for planners, schedulers and pictures.
        folders, archive: write checkpoints to folders, and sequences to files in two parts, for caches and servers.
    Raises SpecError: an option that cannot work, or a budget too small for one sequence.
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
        disk_budget: float | str | None = None,
        poison: bool = False,
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_arguments("HybridMemory", (), unknown)
        self.rollback_window = read_count("rollback_window", rollback_window, 0, "tokens")
        self.page_tokens = read_count("page_tokens", page_tokens, 1, "tokens")
        check_choices(fold, host_attention, host_pages)
        self.spec = resolved_spec(spec, device, dtype, state_dtype)
        # By the spec's device, not by device=: a dry run counts what the real device would hold.
        self.fold: Fold = fold or default_fold(self.spec, spec.device.type, self.rollback_window)
        rules = TailRules.of(self.fold, self.rollback_window)
        self._coordinator = build(
            self.spec, budget, page_tokens=self.page_tokens, rules=rules, host_pages=host_pages,
            host_attention=host_attention, host_budget=host_budget, swap_dir=swap_dir, disk_budget=disk_budget,
            poison=poison,
        )  # fmt: skip
        self.counters = Counters(self._coordinator)
        self._swapping = Swapping(self._coordinator)
        self.archive = Archive(self._coordinator, self._swapping, self.page_tokens, rules)
        self.folders = Folders(self._coordinator, self._swapping, self.page_tokens, rules)
        self.budget_bytes = self.counters.budget_bytes

    __reduce_ex__ = refuse_to_copy("write sequences with memory.save(sequence, path) and load them there, or fork one")

    @property
    def is_open(self) -> bool:
        """True if this memory can be used: it is not closed, and was made in this process."""
        return self._coordinator.why_ended is None

    def __enter__(self) -> HybridMemory:
        if self._coordinator.why_ended is not None:
            raise SequenceError(self._coordinator.why_ended)
        return self

    def __exit__(self, *error: object) -> None:
        self._coordinator.close()

    # Sequences

    @property
    def sequences(self) -> list[Sequence]:
        """Return all open sequences and checkpoints (`.is_checkpoint`), in the order in which they were opened."""
        self._coordinator.mend()
        return list(self._coordinator.ledger.handles.values())

    def open(self, *excess: Never, encoder: Encoded | None = None, **unknown: Never) -> Sequence:
        """Open a new, empty sequence. It holds no bytes until tokens are fed. Cost: O(1).

        Args:
            encoder: only of an encoder-decoder model: what `model.encode` returned for this sequence's input. It is
                copied, shared by forks, untouched by rollback, and freed with the last sequence that refers to it.
        Raises:
            BatchError: `encoder` is missing, not wanted, or does not fit the model. CapacityError: no room for it.
        """
        if excess or unknown:
            refuse_arguments("memory.open", excess, unknown)
        with uninterrupted_call() as _until_return:
            return self._coordinator.handed_over(self._coordinator.open, encoder)

    def close(self, sequence: Sequence = _NOT_GIVEN, *excess: Never) -> None:
        """Forget a sequence or a checkpoint, and free the bytes that no other refers to.

        Raises SequenceError: a bad handle, or one in an open step; then nothing has changed.
        """
        if excess or sequence is _NOT_GIVEN:
            refuse_arguments("memory.close", excess, {})
        self._coordinator.close_one(sequence)

    def close_all(self) -> None:
        """Close the whole memory, as the end of `with HybridMemory(...) as memory:` does.

        It frees all bytes and removes the files of what was swapped out. Every later use of the memory or of its
        handles raises SequenceError, but for closing it again.

        Raises SequenceError: a sequence is in an open step; then nothing has changed.
        """
        self._coordinator.close()

    def fork(self, sequence: Sequence, *excess: Never, **unknown: Never) -> Sequence:
        """Open a new sequence that continues from the position of this one. Copies no tensor: blocks are shared until
        one side writes; only the last page, the tail and the head are copied then. Raises SequenceError."""
        if excess or unknown:
            refuse_arguments("memory.fork", excess, unknown)
        with uninterrupted_call() as _until_return:
            return self._coordinator.handed_over(self._coordinator.copy, sequence, False, True)

    def checkpoint(
        self, sequence: Sequence, *excess: Never, holds_tail: bool = False, **unknown: Never
    ) -> Sequence:  # fmt: skip
        """Make a checkpoint: a fork that is never advanced, to which `rollback` returns from any distance.

        It holds one state of each recurrent layer until it is closed, and the pages that the sequence writes next or
        forgets: at first its last page. Who returns cannot go back further from there.

        Args:
            holds_tail: True: it holds the tail and up to two more states as well, so that who returns can go back as
                far as the sequence can now. With fold="defer", and after a rollback within the tail, there is no state
                at its position, and it holds the tail in any case.
        Raises:
            SequenceError: a bad handle. SpecError: `holds_tail` is neither True nor False.
        """
        if excess or unknown:
            refuse_arguments("memory.checkpoint", excess, unknown)
        if not isinstance(holds_tail, bool):
            raise SpecError(f"holds_tail={holds_tail!r}; give True or False")
        with uninterrupted_call() as _until_return:
            return self._coordinator.handed_over(self._coordinator.copy, sequence, True, holds_tail)

    def reorder(self, moves: Mapping[Sequence, Sequence]) -> None:
        """Permute memories: each key continues as its value was, all at once. For beams: `reorder({a: b, b: b, c: a})`.

        Copies no tensor. Raises SequenceError or BatchError with nothing changed.
        """
        self._coordinator.reorder(moves)

    # Going back

    def rollback(
        self, sequence: Sequence, *excess: Never, to: int | Sequence | None = None, n_tokens: int | None = None,
        **unknown: Never,
    ) -> None:  # fmt: skip
        """Return to an earlier position: later outputs are those of a sequence that never saw the tokens taken back.

        Copies no tensor and runs no layer. It reaches any position from `sequence.horizon` on, position 0, and what a
        checkpoint of the same family holds.

        Args:
            to: tokens to keep, 0 <= to <= length; or a checkpoint of the family: of this sequence, of one it was forked
                from or of a fork. The sequence then continues as the checkpoint was, whatever it has seen since.
            n_tokens: instead of `to`: how many of the newest tokens to take back.
        Raises:
            RollbackError: out of reach, or no position; .resume_at is the nearest reachable position below `.to`.
            SequenceError: a bad handle.
        """
        if excess or unknown:
            refuse_arguments("memory.rollback", excess, unknown)
        self._coordinator.rollback(sequence, to, n_tokens)

    def can_rollback(self, sequence: Sequence, to: int | Sequence) -> bool:
        """True if `rollback(sequence, to)` would succeed now. Raises as `resume_point`."""
        return self._coordinator.can_rollback(sequence, to)

    def resume_point(self, sequence: Sequence, to: int) -> int:
        """Return the nearest position <= `to` that `rollback` reaches now (the length, if `to` lies beyond it).

        Raises SequenceError: a bad `sequence`. RollbackError: `to` is no position, such as -1.
        """
        return self._coordinator.resume_point(sequence, to)

    def drop(self, sequence: Sequence, start: int, end: int, *, approximate: bool = False) -> None:
        """Forget tokens [start, end) of a live sequence, and move those behind them to start (a context shift).

        Attention keeps the rows of the other tokens; keys are rotated to their new positions. Keys and values of later
        tokens, in layers above the first, still carry a trace of the dropped ones, as in llama.cpp. Only a range that
        ends with the sequence leaves none: that is a rollback, where a rollback reaches. Others are untouched.

        Args:
            approximate: recurrent layers cannot forget from the middle: a state holds all tokens in one. False: a model
                that has any is refused. True: their states stay, so they still contain the dropped tokens while
                attention does not, and a rollback by position reaches no further back than `start`.
        Raises:
            DropError: no such range; recurrent layers, unless approximate; attention with a policy, or whose spec does
                not say how keys carry positions; a window that would reach back to rows that have left it.
            CapacityError: no room to copy the rows behind `end` before the old ones are freed.
            SequenceError: a bad handle.
        Cost: those rows are read, rotated and written, in every attention layer. No layer of the model runs.
        """
        self._coordinator.drop(sequence, start, end, approximate=approximate)

    # Out of device memory and back

    def to_host(self, sequence: Sequence) -> None:
        """Offload keys and values of a sequence or a checkpoint to host memory, where attention goes on reading them.

        It can be used as before, also in steps with others. Recurrent states and an encoder's output are not moved.
        Later forks and checkpoints of it have theirs there too, and share them. Pages that it shares now are copied;
        the others keep theirs. An empty sequence begins there. After a `rollback` to a checkpoint it is where the
        checkpoint is, after `reorder` where the source is, after `swap_in` and `load` on the device.

        Raises:
            CapacityError: no room there (see its `.unit`). SpecError: no `host_pages`. SequenceError: a bad handle.
        Cost: the bytes of its keys and values, copied once.
        """
        self._swapping.move(sequence, to_host=True)

    def to_device(self, sequence: Sequence) -> None:
        """Move offloaded keys and values back to the device, bit for bit. Raises as `to_host`."""
        self._swapping.move(sequence, to_host=False)

    def swap_out(self, sequence: Sequence, *, relatives: Iterable[Sequence] = ()) -> None:
        """Move a sequence or a checkpoint out of the budget: into host memory, or into files if that is full.

        Until `swap_in`, its handle serves only for its length and tokens, `save`, `swap_in` and `close`. What it shares
        is copied, for all `relatives`, checkpoints in the budget, once: with these it shares again after `swap_in`.

        Raises CapacityError: no room there. SequenceError: a bad handle. Cost: its bytes, copied once.
        """
        self._swapping.swap_out(sequence, relatives)

    def swap_in(self, sequence: Sequence) -> None:
        """Move a sequence back into the budget, bit for bit as it was.

        Raises CapacityError, or FormatError: its file is damaged. It then stays swapped out.
        """
        self._swapping.swap_in(sequence)

    def save(
        self, sequence: Sequence, path: str | Path, *, checkpoints: Checkpoints = False, forks: Forks = NO_FORKS
    ) -> None:
        """Write all that is remembered of a sequence or a checkpoint to a file, which `load` reads in any process.

        Args:
            path: as fsspec reads it, so it may be a URL. A file there is replaced only when the new one is complete; on
                a local disk only its owner can read the new one (mode 0600), whatever the mode of the old one.
            checkpoints: to be written too, shared bytes once: a list, or True for all of its family and of `forks`.
            forks: name -> a live sequence to be written as well.

        Raises SequenceError: a bad handle. SpecError: a dry run, or a path that names no file. OSError.
        """
        self.archive.save(sequence, path, checkpoints, forks)

    @overload
    def load(self, path: str | Path, *, family: Literal[False] = ...) -> Sequence: ...
    @overload
    def load(self, path: str | Path, *, family: Literal[True]) -> Family: ...
    def load(self, path: str | Path, *, family: bool = False) -> Sequence | Family:
        """Open a new sequence from a file; it continues, bit for bit, where the saved one was.

        Both memories must have the same model, policies, storages, dtypes, rollback_window, fold and page_tokens. With
        `family`, the checkpoints and forks saved with it are opened too, and share blocks as they did. One whose part
        of the file is damaged is left out, with a warning.

        Raises FormatError: no such file, or a damaged, foreign or unsuitable one; nothing has changed. CapacityError.
        """
        with uninterrupted_call() as _until_return:
            loaded = self.archive.load(path, only_first=not family)
            return loaded if family else loaded.sequence

    # Steps

    def step(self, requests: Requests, *excess: Never, outputs: Outputs = "last", **unknown: Never) -> Step:
        """Make a step over new tokens: `with memory.step({alice: ids, bob: 7}) as step: logits = model(step)`.

        Args:
            requests: tokens of each sequence: one id, or a sequence, array or tensor of ids; any mix of lengths. If all
                are tensors on a CUDA device, such as `zip(sequences, logits.argmax(-1))`, the host waits for them only
                when it leaves the step: so it plans a step while the device computes the one before.
            outputs: "last" gives one row a request, "all" one row a token; always in the order of `requests`.
        Raises:
            BatchError, SequenceError: here, or for tokens that were on the device on leaving. CapacityError: on
            entering, or here for thousands of tokens that the budget could never hold. Nothing has changed then.
        """
        if excess or unknown:
            refuse_arguments("memory.step", excess, unknown)
        sequences, values = read_pairs(requests)
        self._coordinator.mend()
        self._coordinator.room.refuse_hopeless(sequences, values)
        tokens = read_tokens(sequences, values, self.spec.vocab_size)
        self._coordinator.ledger.check_all_usable(sequences)
        return Step(self._coordinator, sequences, tokens, outputs)

    def run(
        self, model: Model | None, requests: Requests, *excess: Never, max_tokens: int = 512,
        outputs: Outputs = "last", **unknown: Never,
    ) -> Tensor | None:  # fmt: skip
        """Feed requests of any size in steps of at most `max_tokens` tokens: all of them, or none.

        Args:
            model: step -> logits; None in a dry run.
            max_tokens: with policies or storages at least 512: there requests are cut at multiples of 512 positions
                alone, so that the same text sees the same rows, whatever this is and whoever shares the steps.
        Returns:
            What one step would have returned: (n_requests, vocab) or (n_tokens, vocab), in the order of `requests`.
        Raises:
            As `step`, and CapacityError before anything is computed: it names the bytes that the whole run needs.
            Whatever the model raises, or a Ctrl-C (if the last step commits then, after this has returned). Every
            sequence is then as it was before.
        """
        if excess or unknown:
            refuse_arguments("memory.run", excess, unknown)
        held = uninterrupted_call()  # from the last commit on, a Ctrl-C waits until this returns
        return run_in_chunks(self, model, requests, max_tokens=max_tokens, outputs=outputs, held=held)

    # Room

    @property
    def budget(self) -> int:
        """Return the bytes that the memory may use at most: what it was made with, in whole multiples of 64."""
        return self.counters.budget_bytes

    @property
    def free_bytes(self) -> int:
        """Return the bytes of the budget that are free."""
        return self.counters.free_bytes

    def add_reclaimer(self, reclaim: Callable[[int], bool]) -> None:
        """Add a function that frees optional bytes, such as cached prefixes, before a call is refused for lack of room.

        `reclaim(missing_bytes)` returns True if it has freed anything. It may close or swap out what is in no step, and
        do nothing else. The memory refers to it until `remove_reclaimer`.
        """
        self._coordinator.room.reclaimers.append(reclaim)

    def remove_reclaimer(self, reclaim: Callable[[int], bool]) -> None:
        """Remove a function that `add_reclaimer` has added. Nothing happens if there is none."""
        if reclaim in self._coordinator.room.reclaimers:
            self._coordinator.room.reclaimers.remove(reclaim)

    def needed_bytes(self, n_tokens: int, *, n_held: int = 0, max_tokens: int = 512) -> int:
        """Return the bytes that one sequence needs to be fed so many tokens, in steps of `max_tokens` as `run` does.

        The `n_held` tokens that it holds before are counted. The number is exact: in a memory of so many bytes the
        run fits, with fewer it does not. Raises SpecError. Cost: milliseconds for a million tokens.
        """
        return self.counters.needed_bytes(n_tokens, n_held=n_held, max_tokens=max_tokens)

    def private_bytes(self, sequence: Sequence) -> int:
        """Return the bytes that closing a sequence or a checkpoint would free. Raises SequenceError."""
        return int(self.counters.private_bytes([sequence])[0])

    # Looking inside

    def usage(self) -> Usage:
        """Count bytes by kind, layers, part and sequence, in the arena; print the result. Cost: O(blocks in use)."""
        self._coordinator.abort_abandoned()
        return self.counters.usage()

    def kernels(self) -> dict[str, str]:
        """Return function -> the set of kernels that computes it here, or "plain torch"; see `chosen_kernels`."""
        return kernels_of(self.spec, self.fold, self.rollback_window)

    def check(self) -> None:
        """Check that slots, positions, references and bytes fit together. Raises IntegrityError."""
        self._coordinator.check()

    if not TYPE_CHECKING:  # a type checker would otherwise accept any name

        def __getattr__(self, name: str) -> object:
            refuse_attribute(self, "HybridMemory", name)

        def __getitem__(self, key: object) -> object:
            raise TypeError("a HybridMemory has no items; memory.sequences lists its open sequences and checkpoints")

    def __repr__(self) -> str:
        state = self._coordinator.why_ended or self.usage().summary
        return f"<HybridMemory for {self.spec.model} on {self.spec.device}: {state}>"

    def _repr_html_(self) -> str:
        title = f"HybridMemory for {self.spec.model} on {self.spec.device}"
        return self.usage().html(title) if self.is_open else escape(repr(self))


def require_memory(memory: object, call: str) -> None:
    """Raise SpecError unless `memory` is a HybridMemory; `call` is what the message says to call."""
    if not isinstance(memory, HybridMemory):
        raise SpecError(f"{memory!r:.80} is no HybridMemory; call {call}, with HybridMemory(model.memory_spec, budget)")


def coordinator_of(memory: HybridMemory) -> Coordinator:
    """Return what keeps the layers of a memory in step, for other packages of this library."""
    return memory._coordinator
