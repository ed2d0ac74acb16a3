"""Saves sequences of a memory to files, and opens sequences from files, for `HybridMemory.save` and `load`."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from hybridmem.memory.blocks.arrays import Bools, Int64s
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.coordinator import Coordinator
from hybridmem.memory.errors import FormatError, IntegrityError, SequenceError
from hybridmem.memory.interface import Sequence
from hybridmem.memory.layer_memories import Held, LayerMemories
from hybridmem.memory.sequences.batch import read_saved_ids
from hybridmem.memory.sequences.folding import TailRules
from hybridmem.memory.sequences.locking import locked
from hybridmem.memory.specs import MemorySpec
from hybridmem.memory.storage.family_files import Member, MemberKind, SavedFamily, family_in, write_family
from hybridmem.memory.storage.files import SEQUENCES_FORMAT, read_path
from hybridmem.memory.storage.names import names_in_files
from hybridmem.memory.storage.passages import SavedPassage
from hybridmem.memory.storage.reading import read_content
from hybridmem.memory.storage.signature import check_signature, check_weights, signature_of
from hybridmem.memory.storage.swapping import Swapping

Checkpoints: TypeAlias = bool | Iterable[Sequence]
Forks: TypeAlias = Mapping[str, Sequence]
_CONTRADICTIONS = (
    ArithmeticError, AttributeError, IntegrityError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""The errors that opening a file raises if its parts contradict each other."""
NO_FORKS: Forks = MappingProxyType({})
_PATH = "the path of a file, such as 'alice.safetensors'"


@dataclass(frozen=True)
class Family:
    """Holds the handles of a loaded sequence and of the checkpoints and forks that were saved with it.

    Attributes:
        checkpoints: the checkpoints, in the order in which they were made.
        forks: the forks, by the names under which they were saved.
    """

    sequence: Sequence
    checkpoints: list[Sequence]
    forks: dict[str, Sequence]


class Archive:
    """Saves the sequences of one memory, and opens sequences from files.

    Args:
        page_tokens, rules: options of the memory. They are a part of its signature.
    """

    def __init__(self, coordinator: Coordinator, swapping: Swapping, page_tokens: int, rules: TailRules) -> None:
        self._coordinator, self._swapping = coordinator, swapping
        self._page_tokens = page_tokens
        self._rules = rules

    @property
    def signature(self) -> str:
        """Return a digest, 64 hexadecimal digits, of the layout and weights that a file must have to be loaded."""
        spec = self._coordinator.spec
        about = [signature_of(spec, self._page_tokens, self._rules), spec.weights]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    # The methods below save and load in two parts, of which only one uses the memory.

    def pack(self, sequence: Sequence) -> Callable[[str], None]:
        """Copy a sequence or a checkpoint out of the memory. Return a function that writes it to a path or URL.

        That function may run in any thread while the memory is used. Both raise what `HybridMemory.save` raises. Cost:
        the bytes are copied once.
        """
        self._coordinator.ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        saved = self._gather([("sequence", "", sequence)])
        # These are copies, because the memory may change before they are written.
        saved = replace(saved, tokens=[tokens.copy() for tokens in saved.tokens])
        return lambda path: write_family(replace(saved, path=read_path("path", path, _PATH)))

    def read(self, path: object) -> SavedFamily:
        """Read the sequence of a file, without its checkpoints and forks, for `open`. Any thread may do so.

        Raises FormatError if there is no such file, or if it is damaged, foreign or unsuitable.
        """
        return self._read(path, only_first=True)

    def open(self, saved: SavedFamily) -> Sequence:
        """Open the sequence that `read` has read. The errors are those of `HybridMemory.load`."""
        return self._coordinator.handed_over(self._open, saved).sequence

    # The methods below save sequences to files.

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return self._coordinator.lock

    def _about(self, spec: MemorySpec) -> dict[str, Any]:
        about = {"signature": signature_of(spec, self._page_tokens, self._rules), "model": spec.model}
        return about | ({} if spec.weights is None else {"weights": spec.weights})

    @locked
    def save(self, sequence: Sequence, path: object, checkpoints: Checkpoints, forks: Forks) -> None:
        """Write a sequence to a file. See `HybridMemory.save`."""
        self._coordinator.ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        chosen = self._choose(sequence, checkpoints, forks)
        place = read_path("path", path, _PATH)
        write_family(replace(self._gather(chosen), path=place))

    def _gather(self, chosen: list[tuple[MemberKind, str, Sequence]]) -> SavedFamily:
        """Copy sequences out of the memory, under the names that files use."""
        saved = _Gathering(self._coordinator, self._swapping, chosen).saved
        saved = saved.renamed(names_in_files(self._coordinator.layers))
        soft = self._coordinator.spec.soft_tokens
        passages = () if soft is None else tuple(map(SavedPassage.of, soft.known(saved.tokens)))
        return replace(saved, about=self._about(self._coordinator.spec), passages=passages)

    def _choose(
        self, sequence: Sequence, checkpoints: Checkpoints, forks: Forks
    ) -> list[tuple[MemberKind, str, Sequence]]:
        """Return kind, name and handle of each sequence to save, `sequence` first. Raises SequenceError."""
        ledger = self._coordinator.ledger
        if not isinstance(forks, Mapping) or not all(isinstance(name, str) for name in forks):
            raise SequenceError(
                f"forks={forks!r:.80}; give a name for each, such as {{'draft': memory.fork(sequence)}}"
            )
        lineages = {sequence.lineage}
        for fork in forks.values():
            ledger.check_usable(fork, may_be_away=True)
            lineages.add(fork.lineage)
        if checkpoints is True:
            marks = [
                handle for handle in ledger.handles.values() if handle.is_checkpoint and handle.lineage in lineages
            ]
        elif checkpoints is False:
            marks = []
        elif isinstance(checkpoints, Iterable):
            marks = list(dict.fromkeys(checkpoints))
            for mark in marks:
                ledger.check_usable(mark, to_advance=False, may_be_away=True)
                if not mark.is_checkpoint:
                    raise SequenceError(f"{mark!r} is no checkpoint; save it by a name, forks={{'draft': sequence}}")
        else:
            raise SequenceError(f"checkpoints={checkpoints!r:.80}; give True for all of the family, or a list of them")
        chosen: list[tuple[MemberKind, str, Sequence]] = [("sequence", "", sequence)]
        chosen += [("checkpoint", "", mark) for mark in sorted(marks, key=lambda mark: mark.id)]
        return chosen + [("fork", name, fork) for name, fork in forks.items()]

    # The methods below load.

    def load(self, path: object, *, only_first: bool) -> Family:
        """Open the members of a file. See `HybridMemory.load`. With `only_first`, open only the first member."""
        saved = self._read(path, only_first=only_first)
        return self._coordinator.handed_over(self._open, saved)

    @locked
    def _open(self, saved: SavedFamily, made: list[Sequence]) -> Family:
        def attempt() -> list[Sequence]:
            with self._coordinator.journal.change():
                opened = self._restore(saved)
                made.extend(opened)
            return opened

        try:
            opened = self._coordinator.room.make(attempt)
        except _CONTRADICTIONS as error:
            # The checksum is right, so another program, perhaps a malicious one, wrote this content.
            raise FormatError(f"{saved.path} contradicts itself ({error}); save the sequence again") from error
        members = list(zip(opened, saved.members, strict=True))
        checkpoints = [sequence for sequence, member in members if member.kind == "checkpoint"]
        return Family(opened[0], checkpoints, {m.name: sequence for sequence, m in members if m.kind == "fork"})

    def _read(self, path: object, *, only_first: bool) -> SavedFamily:
        """Read a file, with the memory's own names. Warn of members that are left out. Raises FormatError."""
        place = read_path("path", path, "the path of a saved sequence", FormatError)
        spec, layers = self._coordinator.spec, self._coordinator.layers
        saved = family_in(read_content(place, SEQUENCES_FORMAT), only_first=only_first)
        check_signature(place, saved.about, spec, self._page_tokens, self._rules)
        check_weights(place, saved.about, spec)
        if saved.damaged:
            warnings.warn(f"{place} is damaged and loaded without {', '.join(saved.damaged)}", stacklevel=4)
        return saved.renamed(names_in_files(layers).reversed)

    def _restore(self, saved: SavedFamily) -> list[Sequence]:
        """Open the members of a file, inside a change that the caller has begun."""
        coordinator, ledger = self._coordinator, self._coordinator.ledger
        opened, lineages = list[Sequence](), dict[int, int]()
        for member in saved.members:
            opened.append(ledger.open(lineage=lineages.get(member.family), is_checkpoint=member.kind == "checkpoint"))
            lineages.setdefault(member.family, opened[-1].lineage)
        held, blocks = saved.blocks_for(saved.members)
        slots = {sequence.slot: own for sequence, own in zip(opened, held, strict=True)}
        coordinator.layers.restore_all(slots, blocks, coordinator.store)
        n_drops = ledger.n_drops
        for buffer, tokens in enumerate(saved.tokens):
            # All members whose tokens are in this buffer share them. So each becomes a copy of a sequence at the same
            # position.
            model = ledger.open()
            try:
                ids = read_saved_ids(tokens, coordinator.spec.vocab_size, coordinator.spec.soft_tokens)
                ledger.restore(model.slot, ids, len(ids))
                for sequence, member in zip(opened, saved.members, strict=True):
                    if member.buffer == buffer:
                        drops = tuple((position, n_drops + number) for position, number in member.drops)
                        ledger.restore_position(model.slot, member.length, member.peak, drops)
                        model.lineage = sequence.lineage
                        ledger.copy([model], [sequence], coordinator.layers.horizon)
            finally:
                ledger.close(model)
        if (soft := coordinator.spec.soft_tokens) is not None:
            for passage in saved.passages:
                passage.restore(soft, coordinator.spec.device)
        for sequence in opened:
            coordinator.check_slot(sequence.slot)
        return opened


class _Gathering:
    """Copies out of a memory all that several sequences and checkpoints hold. Shared blocks are copied once.

    Bytes that belong to no token of any of these sequences become zeros. Cost: the bytes are copied once.

    Attributes:
        saved: what was copied. Layer memories and pools have the memory's own names in it.
    """

    def __init__(
        self, coordinator: Coordinator, swapping: Swapping, chosen: list[tuple[MemberKind, str, Sequence]]
    ) -> None:
        self._coordinator, self._swapping = coordinator, swapping
        self._places: list[tuple[LayerMemories, Store]] = [(coordinator.layers, coordinator.store)]
        if coordinator.host_pages is not None:
            self._places.append(coordinator.host_pages.place)
        self._slots = [sequence.slot for _, _, sequence in chosen]
        self._n_blocks = dict[str, int]()
        # These dicts map place and pool to an array: the number in the file of each block of the pool, and its live
        # rows.
        self._numbers = dict[tuple[int, str], Int64s]()
        self._live = dict[tuple[int, str], Bools]()
        self._note_live_rows()
        ledger, buffers, families = coordinator.ledger, dict[int, int](), dict[int, int]()
        numbers = sorted({number for slot in self._slots for _, number in ledger.drops(slot)})
        ranks = {number: rank for rank, number in enumerate(numbers, 1)}
        self.saved = SavedFamily("", {}, [], [], {})
        for kind, name, sequence in chosen:
            slot, tokens = sequence.slot, ledger.tokens(sequence.slot)
            # Tokens of one buffer begin at one address. Empty arrays would all share an address, so each family gets a
            # number of its own for them.
            address = tokens.ctypes.data if len(tokens) else -1 - sequence.lineage
            buffer = buffers.setdefault(address, len(buffers))
            drops = tuple((position, ranks[number]) for position, number in ledger.drops(slot))
            member = Member(
                kind, name, families.setdefault(sequence.lineage, len(families)), buffer, len(tokens),
                int(ledger.peaks[slot]), drops, self._held_by(slot),
            )  # fmt: skip
            self.saved.members.append(member)
            if buffer == len(self.saved.tokens):
                self.saved.tokens.append(tokens)
            elif len(tokens) > len(self.saved.tokens[buffer]):
                self.saved.tokens[buffer] = tokens

    def _note_live_rows(self) -> None:
        """Mark the rows of all blocks that belong to tokens of at least one of the sequences."""
        ledger = self._coordinator.ledger
        for slot in self._slots:
            if ledger.is_away[slot]:
                continue
            for place, (layers, _) in enumerate(self._places):
                for memory in layers.values():
                    held, live = memory.blocks_of(slot), memory.live_rows(slot, int(ledger.lengths[slot]))
                    for pool, _ in memory.pools:
                        if len(ids := held[pool.name]):
                            rows = live[pool.name]
                            empty = np.zeros((len(pool.counts), rows.shape[1]), np.bool_)
                            np.logical_or.at(self._live.setdefault((place, pool.name), empty), ids, rows)

    def _held_by(self, slot: int) -> Held:
        """Return the records and the blocks of a slot. Copy those blocks that no earlier slot held."""
        if self._coordinator.ledger.is_away[slot]:
            snapshot = self._swapping.snapshot(slot)
            return Held(snapshot.records, {pool: self._add(pool, blocks) for pool, blocks in snapshot.blocks.items()})
        numbers = dict[str, Int64s]()
        for place, (layers, store) in enumerate(self._places):
            for memory in layers.values():
                held = memory.blocks_of(slot)
                for pool, layout in memory.pools:
                    if not len(ids := held[pool.name]):
                        continue
                    found = self._numbers.setdefault((place, pool.name), np.full(len(pool.counts), -1, np.int64))
                    new, first = np.unique(ids[found[ids] < 0], return_index=True)
                    if len(new):
                        new = new[np.argsort(first)]
                        blocks = store.read(pool.addresses[new], pool.block_bytes)
                        layout.blank_(blocks, self._live[place, pool.name][new])
                        found[new] = self._add(pool.name, blocks)
                    numbers[pool.name] = found[ids]
        records = {name: memory.record(slot) for name, memory in self._coordinator.layers.items()}
        return Held(records, numbers)

    def _add(self, pool: str, blocks: Tensor) -> Int64s:
        """Add blocks to a pool of the file, and return their numbers."""
        start = self._n_blocks.get(pool, 0)
        self._n_blocks[pool] = start + len(blocks)
        self.saved.blocks.setdefault(pool, []).append(blocks)
        return np.arange(start, start + len(blocks))
