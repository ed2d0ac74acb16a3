"""HybridMemory: attention caches and recurrent states behind one interface, always in step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from memory.blocks.arguments import read_count
from memory.blocks.pinned import HostAttention
from memory.build import build, check_choices, default_fold, kernels_of, resolved_spec
from memory.chunked_prefill import Model, run_in_chunks
from memory.errors import FormatError, SequenceError, SpecError
from memory.interface import Encoded, Requests, Sequence, refuse_to_copy
from memory.sequences.batch import read_pairs, read_tokens
from memory.sequences.folding import Fold, TailRules
from memory.sequences.interrupts import uninterrupted_call
from memory.specs import MemorySpec
from memory.step import Outputs, Step
from memory.storage.files import read_path, read_snapshot, write_snapshot
from memory.storage.names import names_in_files
from memory.storage.signature import fitted, signature_of
from memory.views.counters import Counters
from memory.views.usage import Usage, measure


class Whole(Enum):
    """What `close` closes if it is given no sequence. (None is what a variable holds whose sequence was
    never opened.)"""

    MEMORY = auto()


class HybridMemory:
    """The memory of a model for any number of sequences.

    Args:
        spec: what the model needs remembered: `model.memory_spec`.
        budget: bytes for everything, such as 10**9, "1GiB" (2**30) or "1GB" (10**9). On the CPU, bytes not yet used
            cost nothing.
        rollback_window: tokens that every sequence can take back, counted from the furthest position it reached. 0
            keeps no tail: then only position 0, the present and checkpoints can be returned to.
        page_tokens: tokens a page of keys and values.
        fold: how old tokens of recurrent layers leave the tail. "keep" keeps the state each time it passes a multiple
            of the window: nothing is computed, but a sequence holds a third state and a tail of two windows. "replay"
            runs old rows again: a tail of 1.2 windows, and about a tenth to a fifth more time to decode on a CPU.
            "defer" writes states only then, and each step reads body and tail: a tail of 1.5 windows of what tokens
            did, no state at the newest position; for all but RWKV-4 and RG-LRU. Unless given, "keep" for a model on the
            CPU, on a CUDA device "defer" where all recurrences can and so move fewer bytes (SSD, gated delta rules,
            linear attention; others with small windows), and else "replay".
        device, dtype: the spec's unless given, or their names. device="meta" is a dry run: all bookkeeping, no tensors,
            no model.
        state_dtype: of recurrent states, which models ask for in float32. "bfloat16" halves them; each step rounds its
            end state, so outputs drift (`python -m benchmarks states` measures how far).
        host_pages: for `to_host`: bytes of keys and values that may be in host memory, beside the budget; a CUDA
            device's memory pins them all at once. None: there is no such place.
        host_attention: who attends to them on a CUDA device. "stream": the device, which reads them over the bus; the
            host never waits. "compute": the host's processor, to which the device sends queries, keys and values, and
            which waits for them in each attention layer, as the device then does for what it found; results differ by
            rounding. On the CPU both are the same.
        host_budget, swap_dir: for `swap_out`: bytes that may wait in host memory (None: any number), and the folder
            where those go that find no room there (None: nowhere); one of this process alone, for what killed processes
            left there is removed.
        poison: for tests: fill fresh and freed memory with NaN.
    Attributes:
        spec, rollback_window, page_tokens, fold: what it goes by, defaults filled in; to be read, not set. A memory
            made with these has blocks of the same sizes.
        budget_bytes: what it may use at most; see `budget`.
        counters: what it counts, for planners, schedulers and pictures.
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
        rollback_window = read_count("rollback_window", rollback_window, 0, "tokens")
        page_tokens = read_count("page_tokens", page_tokens, 1, "tokens")
        check_choices(fold, host_attention, host_pages)
        self.spec = resolved_spec(spec, device, dtype, state_dtype)
        self.rollback_window = rollback_window
        self.page_tokens = page_tokens
        # Of the spec's device: a dry run keeps the books of the real thing.
        self.fold: Fold = fold or default_fold(self.spec, spec.device.type, rollback_window)
        rules = TailRules.of(self.fold, rollback_window)
        self._rules = rules
        self._coordinator = build(
            self.spec, budget, page_tokens=page_tokens, rules=rules, host_pages=host_pages,
            host_attention=host_attention, host_budget=host_budget, swap_dir=swap_dir, poison=poison,
        )  # fmt: skip
        self.counters = Counters(self._coordinator)
        self.budget_bytes = self.counters.budget_bytes

    _instead = (
        "write sequences with memory.save(sequence, path) and read them with load in a memory made there, or fork a "
        "sequence"
    )
    __reduce_ex__ = refuse_to_copy

    # The whole

    @property
    def is_open(self) -> bool:
        """Whether it serves: it has not been closed, and is of this process."""
        return self._coordinator.why_ended is None

    def __enter__(self) -> HybridMemory:
        if (why := self._coordinator.why_ended) is not None:
            raise SequenceError(why)
        return self

    def __exit__(self, *error: object) -> None:
        self._coordinator.close()

    # Sequences

    @property
    def sequences(self) -> list[Sequence]:
        """All open sequences and checkpoints (`.is_checkpoint`), in the order in which they were opened."""
        return list(self._coordinator.ledger.handles.values())

    def open(self, *, encoder: Encoded | None = None) -> Sequence:
        """A new, empty sequence. It holds no bytes until tokens are fed. Cost: O(1).

        Args:
            encoder: of an encoder-decoder model, and only of one: what `model.encode` returned for this sequence's
                input. It is copied into the memory, shared by forks, untouched by rollback, and freed with the last
                sequence that refers to it.
        Raises:
            BatchError: `encoder` is missing, not wanted, or does not fit the model. CapacityError: no room for it.
        """
        with uninterrupted_call() as held:
            return self._coordinator.open(encoder, held)

    def close(self, sequence: Sequence | Whole = Whole.MEMORY) -> None:
        """Forget a sequence or a checkpoint; bytes that nobody shares are free at once.
        Without an argument, close the whole memory.

        The bytes of a closed memory, and the files of what was swapped out, go at once. Every later use of it or of its
        handles raises SequenceError; closing it again does nothing. `with HybridMemory(...) as memory:` closes it at
        the end.

        Raises SequenceError: a bad handle, or one in an open step; then nothing has changed.
        """
        if sequence is Whole.MEMORY:
            self._coordinator.close()
        else:
            self._coordinator.close_one(sequence)

    # Copies that share

    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence that continues from where this one (or this checkpoint) stands.

        Copies no tensor: blocks are shared until one side writes, and then only the last page, the tail and the head
        are copied. Raises SequenceError.
        """
        with uninterrupted_call() as held:
            return self._coordinator.copy(sequence, held, is_checkpoint=False)

    def checkpoint(self, sequence: Sequence) -> Sequence:
        """A mark at the sequence's position: `rollback(sequence, to=mark)` returns to it at any distance, until it is
        closed.

        A mark pins its blocks and nothing else; see `fork`. Raises SequenceError.
        """
        with uninterrupted_call() as held:
            return self._coordinator.copy(sequence, held, is_checkpoint=True)

    def reorder(self, moves: Mapping[Sequence, Sequence]) -> None:
        """All at once: each key goes on as its value was. For beam search: `reorder({a: b, b: b, c: a})`.

        Copies no tensor. Raises SequenceError or BatchError with nothing changed.
        """
        self._coordinator.reorder(moves)

    # Going back

    def rollback(self, sequence: Sequence, to: int | Sequence | None = None, *, n_tokens: int | None = None) -> None:
        """Return to an earlier position: later outputs are those of a sequence that never saw the dropped tokens.

        Copies no tensor and runs no layer. Any position from `sequence.horizon` on can be reached, position 0, and
        whatever a checkpoint of the same family holds.

        Args:
            to: tokens to keep, 0 <= to <= length; or a checkpoint of the family: of this sequence, of one it was forked
                from or of a fork. The sequence then goes on as the checkpoint was, whatever it has seen since.
            n_tokens: instead of `to`: how many of the newest tokens to take back.
        Raises:
            RollbackError: out of reach, or no position; carries .to, .horizon and .resume_at, the nearest reachable
                position below.
            SequenceError: a bad handle.
        """
        self._coordinator.rollback(sequence, to, n_tokens)

    def can_rollback(self, sequence: Sequence, to: int | Sequence) -> bool:
        """Whether `rollback(sequence, to)` would succeed now. Raises as `resume_point`."""
        return self._coordinator.can_rollback(sequence, to)

    def resume_point(self, sequence: Sequence, to: int) -> int:
        """The nearest position <= `to` that `rollback` reaches now (the length, if `to` lies beyond it).

        Raises SequenceError: a bad `sequence`. RollbackError: `to` is no position, such as -1.
        """
        return self._coordinator.resume_point(sequence, to)

    def drop(self, sequence: Sequence, start: int, end: int, *, approximate: bool = False) -> None:
        """Forget tokens [start, end) of a live sequence and keep those behind them, which move down by end - start: a
        context shift.

        Attention keeps the rows of the other tokens; keys are turned to their new positions. What the model computed
        while it saw the dropped tokens stays: keys and values of later tokens, in layers above the first, still carry a
        trace of them, as in llama.cpp. Only a range that ends with the sequence leaves none: that is a rollback, where
        a rollback reaches.
        Rollback, forks and checkpoints work on as ever. Forks and checkpoints of before are untouched.

        Args:
            approximate: recurrent layers cannot forget from the middle: their states hold all tokens in one. False: a
                model that has any is refused. True: they stay as they are, so they go on remembering the dropped tokens
                while attention does not, and a rollback by position reaches no further back than `start`. Without
                recurrent layers both are the same.
        Raises:
            DropError: no such range; recurrent layers, unless approximate; attention with a policy, or whose spec does
                not say how keys carry positions; a window that would reach back to rows that have left it.
            CapacityError: no room to copy the rows behind `end` before the old ones are freed. SequenceError: a bad
                handle.
        Cost: those rows are read, turned and written, in every attention layer. No layer of the model runs.
        """
        self._coordinator.drop(sequence, start, end, approximate=approximate)

    # Into host memory and back

    def to_host(self, sequence: Sequence) -> None:
        """Move keys and values of a sequence or a checkpoint into host memory (`host_pages`), where attention finds
        them from now on.

        It can be used as ever, in steps with others as well. What recurrences remember stays on the device, as does
        what an encoder said. Forks and checkpoints that are taken of it from now on have their keys and values there
        too, and share them. What it shares already is copied as well and stays with the others. A sequence that is
        empty begins there. `rollback` to a checkpoint leads to where that is, `reorder` to where the source is,
        `swap_in` and `load` to the device. Nothing happens if it is there.

        Raises:
            CapacityError: no room there (`.unit` says of which memory). SequenceError: a bad handle. SpecError: no
                `host_pages`.
        Cost: the bytes of its keys and values, copied once.
        """
        self._coordinator.move(sequence, to_host=True)

    def to_device(self, sequence: Sequence) -> None:
        """Move them back, bit for bit as they are. Raises as `to_host`; CapacityError: no room in the budget."""
        self._coordinator.move(sequence, to_host=False)

    # Out of the budget and back

    def swap_out(self, sequence: Sequence) -> None:
        """Give a sequence's or a checkpoint's bytes back while it waits: into host memory, then into files
        (`host_budget`, `swap_dir`).

        Its handle stays good for its length and tokens, for `save`, `swap_in` and `close`, and for nothing else until
        it is back. What it shares with others is copied as well and stays with them; when it is back, it shares
        nothing.

        Raises:
            CapacityError: no room there. SequenceError: a bad handle.
        Cost: its bytes, copied once.
        """
        self._coordinator.swap_out(sequence)

    def swap_in(self, sequence: Sequence) -> None:
        """Bring a sequence back, bit for bit as it was.
        Raises CapacityError, or FormatError if its file was damaged: it waits on then.
        """
        self._coordinator.swap_in(sequence)

    def save(self, sequence: Sequence, path: str | Path) -> None:
        """Write all that is remembered of a sequence or a checkpoint to a file, which `load` reads in any process.

        Args:
            path: as fsspec reads it, so it may be a URL. A file there is replaced when the new one is complete, and not
                before; on a local disk only its owner can read it (mode 0600), whoever could read the old one.
        Raises:
            SequenceError: a bad handle. SpecError: a dry run, or a path that can be no file. OSError: from the file
                system.
        Cost: its bytes, copied, hashed and written.
        """
        snapshot, record = self._coordinator.export(sequence)
        place = read_path("path", path, "the path of a file, such as 'alice.safetensors'")
        about = {
            "signature": signature_of(self.spec, self.page_tokens, self._rules),
            "model": self.spec.model,
            **record,
        }
        write_snapshot(place, names_in_files(self._coordinator.layers).renamed(snapshot), about)

    def load(self, path: str | Path) -> Sequence:
        """A new sequence that goes on, bit for bit, where the saved one stood.

        Forks and checkpoints of the saved one are not in its file. The memory must be like the one that wrote it: the
        same model, policies, storages, dtypes, rollback_window, fold and page_tokens; weights are not compared. Formats
        2 and 3 are read.

        Raises:
            FormatError: no such file, or a damaged, foreign or unsuitable one; nothing has changed. CapacityError.
        """
        place = read_path("path", path, "the path of a saved sequence", FormatError)
        snapshot, about = read_snapshot(place)
        snapshot = fitted(place, snapshot, about, self.spec, self.page_tokens, self._rules, self._coordinator.layers)
        with uninterrupted_call() as held:
            return self._coordinator.adopt(snapshot, about, str(path), held)

    # Steps

    def step(self, requests: Requests, *, outputs: Outputs = "last") -> Step:
        """A transaction over new tokens: `with memory.step({alice: ids, bob: 7}) as step: logits = model(step)`.

        Args:
            requests: tokens of each sequence: one id, or a sequence, array or tensor of ids; any mix of lengths. If all
                are tensors on a CUDA device, such as `zip(sequences, logits.argmax(-1))`, the host does not wait for
                them before it leaves the step: it plans a step while the device computes the one before.
            outputs: "last" gives one row a request, "all" one row a token; always in the order of `requests`.
        Raises:
            BatchError, SequenceError: here, or for tokens that were on the device on leaving. CapacityError: on
            entering, or here for thousands of tokens that the budget could never hold. Nothing has changed then.
        """
        sequences, values = read_pairs(requests)
        self._coordinator.room.refuse_hopeless(sequences, values)
        tokens = read_tokens(sequences, values, self.spec.vocab_size)
        self._coordinator.ledger.check_all_usable(sequences)
        return Step(self._coordinator, sequences, tokens, outputs)

    def run(
        self, model: Model | None, requests: Requests, *, max_tokens: int = 512, outputs: Outputs = "last"
    ) -> Tensor | None:
        """Feed requests of any size in steps of at most `max_tokens` tokens: all of them, or none.

        Args:
            model: step -> logits; None in a dry run.
        Returns:
            What one step would have returned: (n_requests, vocab) or (n_tokens, vocab), in the order of `requests`.
        Raises:
            As `step`, and CapacityError before anything is computed: it names the bytes that the whole run needs.
            Whatever the model raises, or a Ctrl-C. Every sequence is then as it was before. A Ctrl-C that comes when
            the last step commits is raised after this has returned.
        """
        held = uninterrupted_call()  # until this returns, once the last step commits
        return run_in_chunks(self, model, requests, max_tokens=max_tokens, outputs=outputs, held=held)

    # Room

    @property
    def budget(self) -> int:
        """Bytes that the memory may use at most: what it was made with, in whole multiples of 64."""
        return self.counters.budget_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that nothing holds."""
        return self.counters.free_bytes

    def add_reclaimer(self, reclaim: Callable[[int], bool]) -> None:
        """Let `reclaim(missing_bytes)` free what is only optional, such as cached prefixes, before any call is refused
        for want of room.

        It says whether it has freed anything; it may close sequences and checkpoints that are in no step, and nothing
        else. The memory holds it until `remove_reclaimer`; one that holds the memory as well keeps both alive until the
        garbage collector finds them.
        """
        self._coordinator.room.reclaimers.append(reclaim)

    def remove_reclaimer(self, reclaim: Callable[[int], bool]) -> None:
        """Ask it no longer. Nothing happens if `add_reclaimer` was never given it."""
        if reclaim in self._coordinator.room.reclaimers:
            self._coordinator.room.reclaimers.remove(reclaim)

    def needed_bytes(self, n_tokens: int, *, n_held: int = 0, max_tokens: int = 512) -> int:
        """Bytes of a budget that one sequence needs to be fed so many tokens, in steps of `max_tokens` as `run` takes
        them.

        Args:
            n_held: tokens that it holds before. What they take is counted.
        Returns:
            To the byte; blocks of several sizes may leave gaps on top, which what `CapacityError` names allows for.
        Cost: no token is needed and nothing is set aside; a million take some milliseconds.
        """
        return self.counters.needed_bytes(n_tokens, n_held=n_held, max_tokens=max_tokens)

    def private_bytes(self, sequence: Sequence) -> int:
        """What closing a sequence or a checkpoint would give back to the budget: what it shares with nobody.
        Raises SequenceError.
        """
        return int(self.counters.private_bytes([sequence])[0])

    # Looking inside

    def usage(self) -> Usage:
        """Bytes by kind, by layers, by part and by sequence, counted in the arena. Print it. Cost: O(blocks in use)."""
        self._coordinator.abort_abandoned()
        return measure(self.counters.inventory(), self.counters.swapped_bytes, self.counters.host_inventory())

    def kernels(self) -> dict[str, str]:
        """Which kernels compute what here: function -> set, as `memory.kernels.chosen_kernels` says of this memory's
        device and dtypes.
        """
        return kernels_of(self.spec, self.fold, self.rollback_window)

    def check(self) -> None:
        """Compare every book with every other: slots, positions, references, bytes. Raises IntegrityError."""
        self._coordinator.check()

    def __repr__(self) -> str:
        state = self._coordinator.why_ended or self.usage().summary
        return f"<HybridMemory for {self.spec.model} on {self.spec.device}: {state}>"

    def _repr_html_(self) -> str:
        if self._coordinator.why_ended:
            return escape(repr(self))
        return self.usage().html(f"HybridMemory for {self.spec.model} on {self.spec.device}")


def require_memory(memory: object, call: str) -> None:
    """Raise SpecError unless this is a memory; `call` says how the caller is called."""
    if not isinstance(memory, HybridMemory):
        raise SpecError(f"{memory!r:.80} is no HybridMemory; call {call}, with HybridMemory(model.memory_spec, budget)")
