"""Defines `HybridMemory`: one interface to attention caches and recurrent states, which always have the same length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, overload

import torch
from torch import Tensor

from hybridmem.defaults import ROLLBACK_WINDOW
from hybridmem.memory.blocks.arguments import read_count
from hybridmem.memory.blocks.copying import refuse_to_copy
from hybridmem.memory.blocks.hints import refuse_arguments, refuse_attribute
from hybridmem.memory.blocks.pinned import HostAttention
from hybridmem.memory.build import build, check_8_bits, check_choices, default_fold, kernels_of, resolved_spec
from hybridmem.memory.chunked_prefill import Model, run_in_chunks
from hybridmem.memory.coordinator import Coordinator
from hybridmem.memory.errors import SequenceError, SpecError
from hybridmem.memory.interface import Encoded, Requests, Sequence, Tokens
from hybridmem.memory.sequences.batch import read_pairs, read_tokens
from hybridmem.memory.sequences.folding import Fold, TailRules
from hybridmem.memory.sequences.interrupts import uninterrupted_call
from hybridmem.memory.specs import MemorySpec
from hybridmem.memory.step import Outputs, Rows, Step
from hybridmem.memory.storage.archive import NO_FORKS, Archive, Checkpoints, Family, Forks
from hybridmem.memory.storage.folders import Folders
from hybridmem.memory.storage.swapping import Swapping
from hybridmem.memory.trees.memories import TreeMemories
from hybridmem.memory.trees.step import TreeStep
from hybridmem.memory.views.counters import Counters
from hybridmem.memory.views.usage import Usage

_NOT_GIVEN: Any = object()


class HybridMemory:
    """Holds what a model remembers of any number of sequences: keys, values and recurrent states, in one budget.

    Args:
        spec: what the model's layers remember: `model.memory_spec`.
        budget: bytes for everything: 10**9, "1GiB" (2**30) or "1GB" (10**9). On the CPU, unused bytes take no RAM.
        rollback_window: tokens that every sequence can take back, counted from its peak, the furthest position that it
            reached. 0 keeps no tail: then a rollback reaches only position 0, the present and checkpoints.
        page_tokens: how many tokens a page of keys and values holds.
        fold: how old tokens of recurrent layers leave the tail. "keep" keeps the state at each multiple of the window.
            Nothing is computed twice, but a sequence holds a third state and a tail of two windows. "replay" runs old
            rows again. A tail has 1.2 windows, and decoding on a CPU takes a tenth to a fifth longer. "defer" writes a
            state only when rows fold. Each step reads the body and a tail of 1.5 windows, and computes the newest state
            again. RWKV-4 and RG-LRU cannot defer. The default on the CPU is "keep". The default on CUDA is "defer" if
            all recurrences can defer and it moves fewer bytes than "replay" (so for SSD, gated delta rules and linear
            attention, and for others with small windows), else "replay".
        device, dtype: replace the device and dtype of the spec. device="meta" is a dry run: all bookkeeping, but no
            tensors and no model.
        state_dtype: the dtype of recurrent states, which models have in float32. "bfloat16" halves their bytes, and
            each step rounds its end state. "int8" and "fp8" take a quarter and round only when rows fold ("defer").
        host_pages: bytes of host memory, beside the budget, for the keys and values that `to_host` moves. For a CUDA
            device all of them are pinned at once. None: `to_host` cannot be used.
        host_attention: what attends to these keys and values on CUDA. "stream": the device reads them over the bus, and
            the host never waits. "compute": the host's processor attends to them. In each attention layer the two wait
            for each other, and results differ by rounding. On the CPU both options are the same.
        host_budget, swap_dir, disk_budget: where `swap_out` moves sequences. `host_budget` is the most bytes of host
            memory. `swap_dir` is a folder, or its URL for fsspec, for sequences that do not fit into host memory; None
            means no files. `disk_budget` is the most bytes of the files. Files of killed processes are removed.
        reproducible: True makes logits a function of the text, bit for bit, on the CPU: docs/concepts/reproducible.md.
            None: whether the model was loaded with `load_model(reproducible=True)`.
        poison: fills fresh and freed memory with NaN, for tests.
    Attributes:
        spec, rollback_window, page_tokens, fold: the options, with defaults filled in. Memories with equal options can
            load each other's files.
        budget_bytes: the most bytes that the memory may use; see `budget`.
        counters: counts bytes, for planners, schedulers and pictures.
        folders: writes checkpoints to folders, for prefix caches.
        archive: writes sequences to files in two parts, for servers.
    Raises SpecError if an option cannot work, or if the budget is too small for one sequence.
    """

    def __init__(
        self,
        spec: MemorySpec,
        budget: float | str = "1GiB",
        *,
        rollback_window: int = ROLLBACK_WINDOW,
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
        reproducible: bool | None = None,
        poison: bool = False,
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_arguments("HybridMemory", (), unknown)
        self.rollback_window = read_count("rollback_window", rollback_window, 0, "tokens")
        self.page_tokens = read_count("page_tokens", page_tokens, 1, "tokens")
        check_choices(fold, host_attention, host_pages)
        self.spec = resolved_spec(spec, device, dtype, state_dtype, reproducible)
        # The device of the given spec decides, not `device`: a dry run counts the bytes of the real device.
        self.fold: Fold = fold or default_fold(self.spec, spec.device.type, self.rollback_window)
        rules = TailRules.of(self.fold, self.rollback_window)
        check_8_bits(self.spec, self.fold, rules)
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

    # The methods below open, copy and close sequences.

    @property
    def sequences(self) -> list[Sequence]:
        """Return all open sequences and checkpoints (`.is_checkpoint`), in the order in which they were opened."""
        self._coordinator.mend()
        return list(self._coordinator.ledger.handles.values())

    def open(self, *excess: Never, encoder: Encoded | None = None, **unknown: Never) -> Sequence:
        """Open a new, empty sequence. It holds no bytes until tokens are fed. Cost: O(1).

        Args:
            encoder: for an encoder-decoder model, what `model.encode` returned for this sequence's input. It is copied.
                Forks share it, a rollback does not change it, and it is freed with the last sequence that refers to it.
        Raises:
            BatchError: `encoder` is missing or does not fit the model, or the model wants none. CapacityError: there is
                no room for it.
        """
        if excess or unknown:
            refuse_arguments("memory.open", excess, unknown)
        with uninterrupted_call() as _until_return:
            return self._coordinator.handed_over(self._coordinator.open, encoder)

    def close(self, sequence: Sequence = _NOT_GIVEN, *excess: Never) -> None:
        """Forget a sequence or a checkpoint, and free the bytes that no other refers to.

        Raises SequenceError, and changes nothing, if the handle is bad or its sequence is in an open step.
        """
        if excess or sequence is _NOT_GIVEN:
            refuse_arguments("memory.close", excess, {})
        self._coordinator.close_one(sequence)

    def close_all(self) -> None:
        """Close the whole memory. `with HybridMemory(...) as memory:` does so at its end.

        It frees all bytes and removes the files of swapped-out sequences. Every later use of the memory or of its
        handles raises SequenceError; only closing it again is allowed.

        Raises SequenceError, and changes nothing, if a sequence is in an open step.
        """
        self._coordinator.close()

    def fork(self, sequence: Sequence, *excess: Never, **unknown: Never) -> Sequence:
        """Open a new sequence that continues from the position of this one.

        No tensor is copied now, because both share their blocks. When one of them writes, only the last page, the tail
        and the head are copied. Raises SequenceError.
        """
        if excess or unknown:
            refuse_arguments("memory.fork", excess, unknown)
        with uninterrupted_call() as _until_return:
            return self._coordinator.handed_over(self._coordinator.copy, sequence, False, True)

    def checkpoint(
        self, sequence: Sequence, *excess: Never, holds_tail: bool = False, **unknown: Never
    ) -> Sequence:  # fmt: skip
        """Make a checkpoint: a fork that is never advanced, to which `rollback` returns from any distance.

        Until it is closed, it holds one state of each recurrent layer, and the pages that its sequence no longer shares
        with it: at first only the last page. A sequence that has returned to it cannot go back further. If there is no
        state at its position (with fold="defer", and after a rollback within the tail), one is computed: the
        recurrences that ran in the last step run over the tail.

        Args:
            holds_tail: if True, it also holds the tail and up to two more states. A sequence that has returned to it
                can then go back as far as the sequence can now. It holds the tail in any case if there is no state at
                its position, and no model has run on this memory since it was made.
        Raises:
            SequenceError: a bad handle. SpecError: `holds_tail` is neither True nor False. CapacityError: there is no
                room for a state that must be computed. With `holds_tail=True` no state is computed.
        """
        if excess or unknown:
            refuse_arguments("memory.checkpoint", excess, unknown)
        if not isinstance(holds_tail, bool):
            raise SpecError(f"holds_tail={holds_tail!r}; give True or False")
        with uninterrupted_call() as _until_return:
            if not holds_tail:
                return self._coordinator.handed_over(self._coordinator.slim_checkpoint, sequence)
            return self._coordinator.handed_over(self._coordinator.copy, sequence, True, True)

    def reorder(self, moves: Mapping[Sequence, Sequence]) -> None:
        """Permute memories, all at once: each key continues from the memory of its value.

        A beam search calls `reorder({a: b, b: b, c: a})`.
        Copies no tensor. Raises SequenceError or BatchError with nothing changed.
        """
        self._coordinator.reorder(moves)

    # The methods below go back.

    def rollback(
        self, sequence: Sequence, *excess: Never, to: int | Sequence | None = None, n_tokens: int | None = None,
        **unknown: Never,
    ) -> None:  # fmt: skip
        """Return to an earlier position.

        Later outputs are those of a sequence that never saw the tokens that were taken back. No tensor is copied and
        no layer runs. Reachable are position 0, any position from `sequence.horizon` on, and the position of any
        checkpoint of the family.

        Args:
            to: how many tokens to keep, 0 <= to <= length; or a checkpoint of this sequence, of one that it was forked
                from, or of a fork. The sequence then continues as the checkpoint was, whatever it has seen since.
            n_tokens: how many of the newest tokens to take back. Give either `to` or `n_tokens`.
        Raises:
            RollbackError: `to` is out of reach, or is no position. `.resume_at` is the nearest reachable position below
                `.to`.
            SequenceError: a bad handle.
        """
        if excess or unknown:
            refuse_arguments("memory.rollback", excess, unknown)
        self._coordinator.rollback(sequence, to, n_tokens)

    def can_rollback(self, sequence: Sequence, to: int | Sequence) -> bool:
        """True if `rollback(sequence, to)` would succeed now. Its errors are those of `resume_point`."""
        return self._coordinator.can_rollback(sequence, to)

    def resume_point(self, sequence: Sequence, to: int) -> int:
        """Return the nearest position <= `to` that `rollback` reaches now. It is the length if `to` lies beyond it.

        Raises SequenceError if `sequence` is bad, and RollbackError if `to` is no position, such as -1.
        """
        return self._coordinator.resume_point(sequence, to)

    def drop(self, sequence: Sequence, start: int, end: int, *, approximate: bool = False) -> None:
        """Forget tokens [start, end) of a live sequence, and move those after them to start (a context shift).

        Attention keeps the rows of the other tokens; keys are rotated to their new positions. In layers above the
        first, keys and values of later tokens still depend on the dropped ones, as in llama.cpp. Dropping the end of a
        sequence leaves no trace: if a rollback reaches `start`, it is a rollback. Other sequences do not change.

        Args:
            approximate: recurrent layers cannot forget tokens in the middle, because one state holds all tokens. If
                False, a model with recurrent layers is refused. If True, their states stay. Then they still contain the
                dropped tokens while attention does not, and a rollback by position reaches no further back than
                `start`.
        Raises:
            DropError: there is no such range; the model has recurrent layers and `approximate` is False; attention has
                a policy, or its spec does not say how keys carry positions; or tokens after the range would see rows
                that have left a window.
            CapacityError: there is no room to copy the rows after `end` before the old ones are freed.
            SequenceError: a bad handle.
        Cost: the rows after `end` are read, rotated and written in every attention layer. No layer of the model runs.
        """
        self._coordinator.drop(sequence, start, end, approximate=approximate)

    # The methods below move sequences out of device memory and back.

    def to_host(self, sequence: Sequence) -> None:
        """Offload keys and values of a sequence or a checkpoint to host memory, where attention goes on reading them.

        The sequence can be used as before, also in steps with others. Recurrent states and an encoder's output stay on
        the device. Later forks and checkpoints of the sequence are in host memory too, and share its pages. Pages that
        it shares now are copied, and the other sequences keep theirs. An empty sequence will keep its first pages in
        host memory. `rollback` to a checkpoint moves it to where the checkpoint is, and `reorder` to where the source
        is. After `swap_in` and `load` it is on the device.

        Raises:
            CapacityError: there is no room in host memory, or in the budget (`.unit` says which). SpecError: the memory
                has no `host_pages`. SequenceError: the handle is bad.
        Cost: the bytes of its keys and values, copied once.
        """
        self._swapping.move(sequence, to_host=True)

    def to_device(self, sequence: Sequence) -> None:
        """Move offloaded keys and values back to the device, bit for bit. Its errors are those of `to_host`."""
        self._swapping.move(sequence, to_host=False)

    def swap_out(self, sequence: Sequence, *, relatives: Iterable[Sequence] = ()) -> None:
        """Move a sequence or a checkpoint out of the budget: into host memory, or into files if host memory is full.

        Until `swap_in`, its handle gives only its length and tokens, and can be passed only to `save`, `swap_in` and
        `close`. Blocks that it shares are copied. `relatives` are checkpoints that stay in the budget: blocks shared
        with them are copied only once, and shared again after `swap_in`.

        Raises CapacityError if there is no room, and SequenceError if the handle is bad. Cost: its bytes are copied
        once.
        """
        self._swapping.swap_out(sequence, relatives)

    def swap_in(self, sequence: Sequence) -> None:
        """Move a sequence back into the budget, bit for bit as it was.

        Raises CapacityError, or FormatError if its file is damaged. The sequence then stays swapped out.
        """
        self._swapping.swap_in(sequence)

    def save(
        self, sequence: Sequence, path: str | Path, *, checkpoints: Checkpoints = False, forks: Forks = NO_FORKS
    ) -> None:
        """Write all that is remembered of a sequence or a checkpoint to a file, which `load` reads in any process.

        Args:
            path: a path or a URL, as fsspec reads it. A file there is replaced only when the new one is complete. On a
                local disk only its owner can read the new file (mode 0600), whatever the mode of the old one.
            checkpoints: a list of checkpoints to write too, or True for all checkpoints of its family and of `forks`.
                Shared bytes are written once.
            forks: name -> a live sequence to write as well.

        Raises SequenceError if a handle is bad, SpecError in a dry run or if the path names no file, or OSError.
        """
        self.archive.save(sequence, path, checkpoints, forks)

    @overload
    def load(self, path: str | Path, *, family: Literal[False] = ...) -> Sequence: ...
    @overload
    def load(self, path: str | Path, *, family: Literal[True]) -> Family: ...
    def load(self, path: str | Path, *, family: bool = False) -> Sequence | Family:
        """Open a new sequence from a file. It continues, bit for bit, where the saved sequence was.

        Both memories must have the same model, policies, storages, dtypes, rollback_window, fold and page_tokens. With
        `family`, the checkpoints and forks in the file are opened too, and share blocks as they did. A checkpoint or
        fork whose part of the file is damaged is left out, with a warning.

        Raises FormatError if there is no such file, or if it is damaged, foreign or unsuitable, or else CapacityError.
        In each case nothing has changed.
        """
        with uninterrupted_call() as _until_return:
            loaded = self.archive.load(path, only_first=not family)
            return loaded if family else loaded.sequence

    # The methods below make steps.

    def step(
        self, requests: Requests, *excess: Never, outputs: Rows = "last",
        parents: Mapping[Sequence, Tokens] | None = None, **unknown: Never,
    ) -> Step:  # fmt: skip
        """Make a step over new tokens: `with memory.step({alice: ids, bob: 7}) as step: logits = model(step)`.

        Args:
            requests: the tokens of each sequence: one id, or a list, array or tensor of ids. Lengths may differ. If all
                are tensors on a CUDA device, such as `zip(sequences, logits.argmax(-1))`, the host waits for them only
                when it leaves the step: so it plans a step while the device computes the step before.
            outputs: "last" gives one row of logits for each request, "all" gives one for each token, and a tuple says
                for each request how many of its last tokens have one. Rows are in the order of `requests`.
            parents: for sequences whose tokens are a tree of drafts: for each token, the index of the one before it
                among the sequence's tokens, or -1 for the sequence's end. A token sees its path only, and the step must
                accept one path: `step.accept({alice: [0, 2]})`. Raises SpecError where old rows are evicted, quantised
                or chosen, or may be on the host.
        Raises:
            BatchError, SequenceError: raised here, or when the step is left if the tokens were on the device.
            CapacityError: raised when the step is entered, or here if requests of thousands of tokens could never fit
                into the budget. Nothing has changed then.
        """
        if excess or unknown:
            refuse_arguments("memory.step", excess, unknown)
        sequences, values = read_pairs(requests)
        self._coordinator.mend()
        self._coordinator.room.refuse_hopeless(sequences, values)
        tokens = read_tokens(sequences, values, self.spec.vocab_size, self.spec.soft_tokens)
        self._coordinator.ledger.check_all_usable(sequences)
        if parents is None:
            return Step(self._coordinator, sequences, tokens, outputs)
        with self._coordinator.lock:
            if self._coordinator.trees is None:
                self._coordinator.trees = TreeMemories(self._coordinator.layers, self._coordinator.places)
        return TreeStep(self._coordinator, sequences, tokens, outputs, parents)

    def run(
        self, model: Model | None, requests: Requests, *excess: Never, max_tokens: int = 512,
        outputs: Outputs = "last", **unknown: Never,
    ) -> Tensor | None:  # fmt: skip
        """Feed requests of any size in steps of at most `max_tokens` tokens: all of them, or none.

        Args:
            model: step -> logits; None in a dry run.
            max_tokens: the most tokens of a step. With policies or storages it counts as at least 512, and requests are
                cut at multiples of 512 positions: so a text sees the same rows whatever else the steps feed.
        Returns:
            What one step would have returned: (n_requests, vocab) or (n_tokens, vocab), in the order of `requests`.
        Raises:
            The errors of `step` and of the model, after which every sequence is as it was. CapacityError comes before
            anything is computed, and names the bytes of all. A Ctrl-C during the last commit comes after the call.
        """
        if excess or unknown:
            refuse_arguments("memory.run", excess, unknown)
        held = uninterrupted_call()  # From the last commit on, a Ctrl-C waits until this function returns.
        found = run_in_chunks(self, model, requests, max_tokens=max_tokens, outputs=outputs, held=held)
        del held  # An error that somebody keeps, such as one while a kernel was compiled, would keep it.
        return found

    # The methods below make room.

    @property
    def budget(self) -> int:
        """Return the most bytes that the memory may use: the budget it was given, rounded down to a multiple of 64."""
        return self.counters.budget_bytes

    @property
    def free_bytes(self) -> int:
        """Return the bytes of the budget that are free."""
        return self.counters.free_bytes

    def add_reclaimer(self, reclaim: Callable[[int], bool]) -> None:
        """Add a function that frees optional bytes, such as cached prefixes, before a call is refused for lack of room.

        `reclaim(missing_bytes)` returns True if it has freed anything. It may only close or swap out sequences that are
        in no step. The memory refers to it until `remove_reclaimer`.
        """
        self._coordinator.room.reclaimers.append(reclaim)

    def remove_reclaimer(self, reclaim: Callable[[int], bool]) -> None:
        """Remove a function that `add_reclaimer` has added. Do nothing if it was not added."""
        if reclaim in self._coordinator.room.reclaimers:
            self._coordinator.room.reclaimers.remove(reclaim)

    def needed_bytes(self, n_tokens: int, *, n_held: int = 0, max_tokens: int = 512) -> int:
        """Return the bytes that one sequence needs while `run` feeds it `n_tokens` tokens in steps of `max_tokens`.

        The result includes the bytes of the `n_held` tokens that the sequence already has. It is exact: the run fits
        into a memory of so many bytes, but not of fewer. Raises SpecError. Cost: milliseconds for a million tokens.
        """
        return self.counters.needed_bytes(n_tokens, n_held=n_held, max_tokens=max_tokens)

    def private_bytes(self, sequence: Sequence) -> int:
        """Return the bytes that closing a sequence or a checkpoint would free. Raises SequenceError."""
        return int(self.counters.private_bytes([sequence])[0])

    # The methods below look inside.

    def usage(self) -> Usage:
        """Count the bytes in use by kind, by layers, by part and by sequence.

        The result can be printed. Cost: O(blocks in use).
        """
        self._coordinator.abort_abandoned()
        return self.counters.usage()

    def kernels(self) -> dict[str, str]:
        """Return, for each function that layers need here, the set of kernels that computes it, or "plain torch".

        See `chosen_kernels`.
        """
        return kernels_of(self.spec, self.fold, self.rollback_window)

    def check(self) -> None:
        """Check that slots, positions, reference counts and bytes are consistent. Raises IntegrityError."""
        self._coordinator.check()

    if not TYPE_CHECKING:  # Otherwise a type checker would accept any name.

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
    """Raise SpecError unless `memory` is a HybridMemory. The message names `call` as the right call."""
    if not isinstance(memory, HybridMemory):
        raise SpecError(f"{memory!r:.80} is no HybridMemory; call {call}, with HybridMemory(model.memory_spec, budget)")


def coordinator_of(memory: HybridMemory) -> Coordinator:
    """Return the coordinator of a memory, for other packages of this library."""
    return memory._coordinator
