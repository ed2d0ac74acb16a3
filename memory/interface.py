"""Declares the interface between the parts of a memory: handles of sequences, packed steps, and layer memories.

Shape legend, used as suffixes of local tensors and arrays everywhere (`k_TGD`):

    S sequences (requests) in this step     T tokens in this step, packed: one flat axis, no padding
    H query heads   G key/value heads       D head dimension    M model (hidden) dimension
    E inner channels of a recurrence        N states a channel  W taps of a convolution
    P tokens a page                         R elements of a row, flattened

Units: `n_*` counts, `*_bytes`, `*_tokens`; positions are token indices and intervals half-open, [start, end).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import ReferenceType

import numpy as np
from torch import Tensor

from hybridmem.memory.blocks.arguments import is_integer
from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.copying import refuse_to_copy
from hybridmem.memory.blocks.hints import refuse_attribute
from hybridmem.memory.blocks.holdings import Holding, LiveRows, Record
from hybridmem.memory.errors import DropError, SequenceError

if TYPE_CHECKING:
    from hybridmem.memory.blocks.layout import BlockLayout
    from hybridmem.memory.blocks.pool import BlockPool
    from hybridmem.memory.blocks.staging import Stage


@dataclass(frozen=True)
class Dropped:
    """Names the tokens [start, end) that a slot will forget.

    `length` and `peak` are the slot's values before the drop.
    """

    slot: int
    start: int
    end: int
    length: int
    peak: int
    approximate: bool

    @staticmethod
    def of(slot: int, start: int, end: int, length: int, peak: int, *, approximate: bool) -> Dropped:
        """Check the range. Raises DropError unless 0 <= start <= end <= length."""
        if not (is_integer(start) and is_integer(end)) or not 0 <= start <= end <= length:
            raise DropError(
                f"start={start!r}, end={end!r} is no range of the {length} tokens remembered; give 0 <= start <= end "
                f"<= {length}",
                start=start, end=end,
            )  # fmt: skip
        return Dropped(slot, int(start), int(end), length, peak, approximate)

    @property
    def n_tokens(self) -> int:
        return self.end - self.start


class DropsTokens(Protocol):
    """Declares how a layer memory drops tokens from the middle of a slot. It is a part of `LayerMemory`."""

    def plan_drop(self, dropped: Dropped) -> Any:
        """Copy the rows after the dropped tokens into new blocks.

        Raises DropError or CapacityError with nothing changed.
        """
        ...

    def bytes_to_drop(self, dropped: Dropped) -> int:
        """Return the bytes of the blocks that `plan_drop` allocates. Raises DropError."""
        ...

    def drop(self, plan: Any) -> None:
        """Forget the tokens: the copies of `plan_drop` replace the blocks from which they were made."""
        ...

    def abandon_drop(self, plan: Any) -> None:
        """Free the copies of a plan that is not carried out. Nothing else has changed."""
        ...


class SequenceOwner(Protocol):
    """Declares what a handle calls of the memory that made it."""

    def length_of(self, sequence: Sequence) -> int:
        """Return the number of tokens of an open sequence."""
        ...

    def tokens_of(self, sequence: Sequence) -> Int64s:
        """Return a view of the token ids of an open sequence, (length,)."""
        ...

    def horizon_of(self, sequence: Sequence) -> int:
        """Return the earliest position that a rollback of an open sequence reaches."""
        ...

    def is_whole(self, sequence: Sequence) -> bool:
        """True if an open sequence remembers exactly what a new sequence would remember after the same tokens."""
        ...

    def is_away(self, sequence: Sequence) -> bool:
        """True if an open sequence is swapped out."""
        ...

    def is_on_host(self, sequence: Sequence) -> bool:
        """True if keys and values of an open sequence are offloaded to host memory."""
        ...

    def html_of(self, sequence: Sequence) -> str:
        """Return the HTML that a notebook shows for an open sequence."""
        ...

    def abort_abandoned(self) -> bool:
        """Abort steps that an interrupt left open before `__exit__` ran. Return True if there was any."""
        ...


class Sequence:
    """Refers to one remembered sequence or checkpoint: a handle, valid only in the memory that made it.

    It does not keep its memory alive.

    Attributes:
        id: the number of the handle. A memory never uses a number twice.
        is_checkpoint: True if it can be forked, returned to and closed, but not advanced.
    """

    __slots__ = ("__weakref__", "_owner", "closed", "id", "is_checkpoint", "lineage", "slot")

    __reduce_ex__ = refuse_to_copy(
        "use memory.fork(sequence) here, and memory.save(sequence, path) and load to hand it over"
    )

    def __init__(
        self, owner: weakref.ref[SequenceOwner], id: int, slot: int, lineage: int, *, is_checkpoint: bool
    ) -> None:
        self._owner = owner
        self.id = id
        self.slot = slot
        self.lineage = lineage
        self.is_checkpoint = is_checkpoint
        self.closed = False

    @property
    def length(self) -> int:
        """Return how many tokens the sequence remembers."""
        return self._open_owner().length_of(self)

    @property
    def tokens(self) -> Int64s:
        """Return a copy of the token ids that the sequence remembers, int64 (length,)."""
        tokens: Int64s = self._open_owner().tokens_of(self).copy()
        return tokens

    @property
    def horizon(self) -> int:
        """Return the earliest position that `rollback` reaches without a checkpoint.

        Position 0 can always be reached as well.
        """
        return self._open_owner().horizon_of(self)

    @property
    def is_whole(self) -> bool:
        """True if it remembers exactly what feeding its tokens would give. That is false after tokens were dropped."""
        return self._open_owner().is_whole(self)

    @property
    def is_swapped(self) -> bool:
        """True if it is swapped out. Then `HybridMemory.swap_in` must move it back before it can be used."""
        return not self.closed and self._open_owner().is_away(self)

    @property
    def is_on_host(self) -> bool:
        """True if its keys and values are in host memory: see `HybridMemory.to_host`."""
        return not self.closed and self._open_owner().is_on_host(self)

    if not TYPE_CHECKING:  # Otherwise a type checker would accept any name.

        def __getattr__(self, name: str) -> object:
            refuse_attribute(self, "Sequence", name)

        def __len__(self) -> int:
            raise TypeError("a Sequence has no len(); use sequence.length")

        def __bool__(self) -> bool:  # Otherwise `if sequence:` would call its `__len__`.
            return True

    def _open_owner(self) -> SequenceOwner:
        if self.closed:
            raise SequenceError(f"sequence {self.id} is closed; open or fork another one")
        owner = self._owner()
        if owner is None:
            raise SequenceError(
                f"the memory of sequence {self.id} is gone; keep the memory as long as its sequences are used"
            )
        return owner

    def __repr__(self) -> str:
        try:
            state = "closed" if self.closed else f"{self.length} tokens"
        except SequenceError:
            state = "of a memory that is gone"
        return f"<{'checkpoint' if self.is_checkpoint else 'sequence'} {self.id}, {state}>"

    def _repr_html_(self) -> str:
        try:
            return self._open_owner().html_of(self)
        except SequenceError:
            return escape(repr(self))


_ZERO = np.zeros((), np.int64)
Encoded = Seq[tuple[Tensor, Tensor]]
"""Keys and values of all rows of an encoder's output, for each cross-attention in layer order.

Each has the shape (R, n_kv_heads, head_dim).
"""
Tokens = int | Seq[int] | Int64s | Tensor
Requests = Mapping[Sequence, Tokens] | Iterable[tuple[Sequence, Tokens]]


@dataclass(eq=False)
class Packed:
    """Holds the tokens of a step, packed: request after request, in the step's own order.

    All arrays are int64 on the host. Nothing changes it, though it is not frozen, like all that is made for each step:
    a frozen dataclass takes four times as long to make.

    Attributes:
        slots: (S,) slot of each request, in the step's order.
        starts: (S,) how many tokens each sequence held before the step.
        cu_seqlens: (S + 1,) request i has tokens [cu_seqlens[i], cu_seqlens[i + 1]).
        peaks: (S,) the furthest position that each sequence will have reached if all tokens are kept.
        token_ids, positions: (T,) the id and the position of each token.
        place: (S,) place[j] is the index of the caller's request j in the step's order.
        is_verified: True if the caller gets logits of more than last tokens, and may keep only the first tokens of some
            requests, as where drafts are verified. It decides which blocks are used, and never what is computed.
    """

    slots: Int64s
    starts: Int64s
    cu_seqlens: Int64s
    peaks: Int64s
    token_ids: Int64s
    positions: Int64s
    place: Int64s
    is_verified: bool = False

    @cached_property
    def is_decode(self) -> bool:
        """True if every request has exactly one token."""
        # A request whose tree was rejected has no token, so equal totals alone do not show it.
        return len(self.token_ids) == len(self.slots) == np.count_nonzero(self.counts)

    @cached_property
    def counts(self) -> Int64s:
        """Return (S,) the number of new tokens of each request."""
        counts: Int64s = self.cu_seqlens[1:] - self.cu_seqlens[:-1]
        return counts

    @property
    def nothing(self) -> Int64s:
        """Return (S,) zeros, the number of tokens that an aborted step keeps.

        The array is a view, so it needs no memory.
        """
        nothing: Int64s = np.broadcast_to(_ZERO, self.slots.shape)
        return nothing

    @cached_property
    def ends(self) -> Int64s:
        """Return (S,) the length of each sequence if all its tokens are kept."""
        ends: Int64s = self.starts + self.counts
        return ends


@dataclass(frozen=True)
class Stretch:
    """Says from where to where N sequences will be fed, each in one step, so that the bytes can be computed.

    All arrays are int64 (N,) on the host.

    Attributes:
        slots: the slot of each sequence; -1 if it is not open yet.
        starts, ends: the new tokens [start, end) of each sequence.
        peaks: the furthest position that each sequence has reached before. It is at least the sequence's start.
        at_most: True to count, for sequences that were rolled back, all states that their step may write. If False,
            none of these states is counted.
    """

    slots: Int64s
    starts: Int64s
    ends: Int64s
    peaks: Int64s
    at_most: bool = False

    def moved(self, offsets: Int64s) -> Stretch:
        """Return the same stretch with the positions of sequence i moved ahead by offsets[i]; offsets are (N,)."""
        starts, ends, peaks = (at + offsets for at in (self.starts, self.ends, self.peaks))
        return replace(self, starts=starts, ends=ends, peaks=peaks)


Plans = dict[str, Any]
"""Maps the name of a layer memory to its plan for a step, which only that layer memory reads."""


@dataclass(eq=False)
class OpenRun:
    """Holds what the sequences return to if several steps that count together are not completed.

    Attributes:
        marks: a checkpoint of each sequence.
        block: refers to an object on the stack of the run's `with` statement. It lives until the run ends.
    """

    marks: dict[Sequence, Sequence]
    block: ReferenceType[Any] | None


@dataclass(eq=False)
class OpenStep:
    """Holds what was allocated for a step, until the step is committed or aborted.

    Attributes:
        scope: a weak reference to an object that lives until the step is left: an object on the stack of the `with`
            statement, or the `Step` itself.
    """

    packed: Packed
    plans: Plans
    stage: Stage | None
    scope: ReferenceType[Any]
    is_settled: bool = False


class StepPlan(Protocol):
    """Declares what all plans of layer memories have in common. Only its own layer memory reads more of a plan."""

    @property
    def can_capture(self) -> bool:
        """True if one CUDA graph serves all steps whose uploads have the same shapes: they launch the same kernels."""
        ...


PlanT = TypeVar("PlanT", bound=StepPlan)


References = dict["BlockPool", list[Int64s]]
"""Maps a pool to arrays of block ids. A block occurs in them as often as it is referred to."""


class SlotTable(Protocol):
    """Says which blocks each slot refers to, and owns these references.

    `BlockTable` is for pages, `TailTable` for tails.
    """

    def share(self, sources: Int64s, targets: Int64s) -> None:
        """Make each slot targets[i] refer to the blocks of slot sources[i], all at once. Copies no tensor."""
        ...

    def release(self, slot: int) -> None:
        """Release every block that the slot refers to."""
        ...


class LayerMemory(DropsTokens, Protocol[PlanT]):
    """Keeps one kind of state for all layers that use it. Callers pass positions to it; it stores no lengths.

    A step is plan -> begin -> (the model runs) -> commit. To abort is to commit 0 tokens. Only `plan` may refuse.
    """

    @property
    def tables(self) -> Seq[SlotTable]:
        """Return the tables of its slots. Callers fork or close a sequence by calling each of them."""
        ...

    @property
    def pools(self) -> list[tuple[BlockPool, BlockLayout]]:
        """Return its pools, each with the layout of its blocks."""
        ...

    @property
    def least_bytes(self) -> int:
        """Return the bytes that one sequence needs for a step of one token, at any length up to a page."""
        ...

    def bytes_for(self, stretch: Stretch) -> Int64s:
        """Return (4, N) bytes: what each sequence holds before, in and after the step, and what its forks share.

        The first three rows are exact if the sequence shares nothing and was never rolled back; else they are lower
        bounds. The fourth row counts those bytes of the first row that forks share however far they go on. Cost: O(N).
        """
        ...

    def plan(self, packed: Packed) -> PlanT:
        """Allocate the blocks that a step will write. Raises CapacityError with nothing changed."""
        ...

    def begin(self, plan: PlanT) -> None:
        """Copy the blocks that the step must not write in place."""
        ...

    def commit(self, plan: PlanT, kept: Int64s) -> None:
        """Keep the first kept[i] new tokens of each request i; `kept` is (S,). 0 leaves that sequence as it was."""
        ...

    def truncate(self, slot: int, to: int) -> None:
        """Forget the tokens from position `to` on. `to` is 0 or at least horizon(slot). Copies no tensor."""
        ...

    def horizon(self, slot: int) -> int:
        """Return the earliest position that `truncate` reaches."""
        ...

    def horizon_after(self, packed: Packed) -> Int64s:
        """Return (S,) what `horizon` will be once the step's tokens are kept."""
        ...

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        """Return pool name -> ids of the blocks that this slot refers to."""
        ...

    def live_rows(self, slot: int, length: int) -> LiveRows:
        """Return which rows of the blocks of `blocks_of`, in the same order, belong to the slot's `length` tokens.

        Other bytes of these blocks come from earlier uses or from tokens that were taken back. They are never saved.
        """
        ...

    def holdings(self, slots: Int64s) -> list[Holding]:
        """Return the blocks of `blocks_of` for many slots (S,), and for each block its part: body, tail or head."""
        ...

    def record(self, slot: int) -> Record:
        """Return the values that `adopt` needs in addition to the blocks of `blocks_of`."""
        ...

    def adopt(self, slot: int, record: Record, blocks: dict[str, Int64s]) -> None:
        """Make an empty slot equal to the slot that `record` describes.

        `blocks` hold the same bytes as that slot's blocks.

        The slot takes over the references to `blocks`. A record that makes no sense may raise any error, but only
        before the slot has taken over a reference.
        """
        ...

    def check(self, lengths: dict[int, int], peaks: dict[int, int], *, is_all: bool = True) -> None:
        """Raise IntegrityError unless the blocks of the given slots fit their lengths and peaks.

        Args:
            is_all: also raise if another slot holds blocks. If False, the cost depends only on the given slots.
        """
        ...

    def references(self, plans: list[PlanT]) -> References:
        """Return all references to its blocks: those of slots, and those of `plans`, the plans of all open steps."""
        ...
