"""What the parts of a memory promise each other: handles, steps, protocols.

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
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar
from weakref import ReferenceType

from torch import Tensor

from memory.blocks.arguments import is_integer
from memory.blocks.arrays import Int64s
from memory.blocks.holdings import Holding, LiveRows, Record
from memory.errors import DropError, SequenceError

if TYPE_CHECKING:
    from memory.blocks.layout import BlockLayout
    from memory.blocks.pool import BlockPool
    from memory.blocks.staging import Stage


@dataclass(frozen=True)
class Dropped:
    """Tokens [start, end) of a slot are to go; `length` and `peak` are its sequence's before that."""

    slot: int
    start: int
    end: int
    length: int
    peak: int
    approximate: bool

    @staticmethod
    def of(slot: int, start: int, end: int, length: int, peak: int, *, approximate: bool) -> Dropped:
        """Raises DropError unless 0 <= start <= end <= length."""
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
    """What a kind of memory does when tokens go: part of `memory.interface.LayerMemory`."""

    def plan_drop(self, dropped: Dropped) -> Any:
        """Copy what moves into fresh blocks, as it will be.
        Raises DropError or CapacityError with everything as before.
        """
        ...

    def drop(self, plan: Any) -> None:
        """Forget the tokens: what was copied takes the place of what it was copied from."""
        ...

    def abandon_drop(self, plan: Any) -> None:
        """Leave everything as it was."""
        ...


def refuse_to_copy(self: Any, protocol: object) -> NoReturn:
    """`__reduce_ex__` of what means something in one place only: `copy`, `pickle` and so `multiprocessing` raise
    SequenceError.

    Its `_instead` says what to do.
    """
    raise SequenceError(
        f"a {type(self).__name__} cannot be copied, pickled or sent to another process; {self._instead}"
    )


class NotCopied:
    """Mixin of objects that mean something in one place only: they refuse `copy`, `deepcopy`, `pickle` and so
    `multiprocessing`.

    Attributes:
        instead: what to do.
    """

    __slots__ = ()
    instead = ""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise SequenceError(
            f"a {type(self).__name__} cannot be copied, pickled or sent to another process; {self.instead}"
        )


class SequenceOwner(Protocol):
    """What a handle asks of the memory that made it."""

    def length_of(self, sequence: Sequence) -> int:
        """Tokens of an open sequence."""
        ...

    def tokens_of(self, sequence: Sequence) -> Int64s:
        """(length,) their ids: a view."""
        ...

    def horizon_of(self, sequence: Sequence) -> int:
        """The earliest position that a rollback of an open sequence reaches."""
        ...

    def is_whole(self, sequence: Sequence) -> bool:
        """Whether an open sequence remembers what feeding its tokens would give."""
        ...

    def is_away(self, sequence: Sequence) -> bool:
        """Whether an open sequence is swapped out."""
        ...

    def is_on_host(self, sequence: Sequence) -> bool:
        """Whether keys and values of an open sequence are in host memory."""
        ...

    def html_of(self, sequence: Sequence) -> str:
        """What an open sequence shows in a notebook."""
        ...

    def abort_abandoned(self) -> bool:
        """Abort steps that have been left without being told; whether there was any."""
        ...


class Sequence(NotCopied):
    """A handle to one remembered sequence.
    It is made by a memory, means nothing to another one, and does not keep its memory alive.

    Attributes:
        id: unique within its memory, never used twice.
        is_checkpoint: True if it is a mark: it can be forked, returned to and closed, not advanced.
    """

    __slots__ = ("__weakref__", "_owner", "closed", "id", "is_checkpoint", "lineage", "slot")

    instead = "use memory.fork(sequence) here, and memory.save(sequence, path) and load to hand it over"

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
        """Tokens remembered."""
        return self._open_owner().length_of(self)

    @property
    def tokens(self) -> Int64s:
        """The token ids remembered, int64 (length,): a copy."""
        tokens: Int64s = self._open_owner().tokens_of(self).copy()
        return tokens

    @property
    def horizon(self) -> int:
        """The earliest position that `rollback` reaches without a checkpoint (position 0 is always reachable)."""
        return self._open_owner().horizon_of(self)

    @property
    def is_whole(self) -> bool:
        """Whether it remembers what feeding its tokens would give: none was dropped from its middle."""
        return self._open_owner().is_whole(self)

    @property
    def is_swapped(self) -> bool:
        """Whether it is swapped out: then `HybridMemory.swap_in` must bring it back before it is used."""
        return not self.closed and self._open_owner().is_away(self)

    @property
    def is_on_host(self) -> bool:
        """Whether its keys and values are in host memory: `HybridMemory.to_host` has moved them, or those it was forked
        from.
        """
        return not self.closed and self._open_owner().is_on_host(self)

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


Encoded = Seq[tuple[Tensor, Tensor]]
"""For each cross-attention of a model, in layer order: keys and values of all encoder rows, (R, n_kv_heads, head_dim)
each.
"""
Tokens = int | Seq[int] | Int64s | Tensor
Requests = Mapping[Sequence, Tokens] | Iterable[tuple[Sequence, Tokens]]


@dataclass(frozen=True)
class Packed:
    """The tokens of a step, packed: request after request in the step's own order. Arrays are int64 on the host.

    Attributes:
        slots: (S,) slot of each request, in the step's order.
        starts: (S,) tokens the sequence held before.
        cu_seqlens: (S + 1,) request i owns tokens [cu_seqlens[i], cu_seqlens[i + 1]).
        peaks: (S,) furthest position each sequence will have reached if all tokens are kept.
        token_ids, positions: (T,).
        place: (S,) place[j] is where the caller's request j stands in the step's order.
    """

    slots: Int64s
    starts: Int64s
    cu_seqlens: Int64s
    peaks: Int64s
    token_ids: Int64s
    positions: Int64s
    place: Int64s

    @cached_property
    def is_decode(self) -> bool:
        """Whether every request has exactly one token."""
        return len(self.token_ids) == len(self.slots)

    @cached_property
    def counts(self) -> Int64s:
        """(S,) new tokens of each request."""
        counts: Int64s = self.cu_seqlens[1:] - self.cu_seqlens[:-1]
        return counts

    @cached_property
    def ends(self) -> Int64s:
        """(S,) length of each sequence if all its tokens are kept."""
        ends: Int64s = self.starts + self.counts
        return ends


@dataclass(frozen=True)
class Stretch:
    """Tokens that sequences are to be fed, each stretch in one step; int64 (N,) on the host.

    Attributes:
        slots: of the sequence; -1 for one that is yet to be opened.
        starts, ends: its tokens [start, end).
        peaks: the furthest position that it has reached before, at least its start.
    """

    slots: Int64s
    starts: Int64s
    ends: Int64s
    peaks: Int64s


Plans = dict[str, Any]
"""Kind of memory -> its plan for a step, known only to that kind."""


@dataclass(eq=False)
class OpenStep:
    """What was set aside for a step, until the memory has committed or aborted it.

    Attributes:
        block: what lives as long as the step is not left: of a `with` statement, what is on its stack; else the `Step`
            itself.
    """

    packed: Packed
    plans: Plans
    stage: Stage | None
    block: ReferenceType[Any]
    is_settled: bool = False


PlanT = TypeVar("PlanT")


class LayerMemory(DropsTokens, Protocol[PlanT]):
    """One kind of memory, for all layers that use it. It is told positions and never keeps one of its own.

    A step is plan -> begin -> (the model runs) -> commit or abort. Only `plan` may refuse.
    """

    @property
    def pools(self) -> list[tuple[BlockPool, BlockLayout]]:
        """Its pools, each with how its blocks are laid out."""
        ...

    @property
    def least_bytes(self) -> int:
        """What one sequence needs to take a step of one token, at any length up to a page."""
        ...

    def bytes_for(self, stretch: Stretch) -> Int64s:
        """(4, N) bytes that each sequence holds before, in and after the step: to the byte if nothing of it is shared
        and it has never been taken back, else at least. And what of those before forks share for good, however far they
        go on. Cost: O(N)."""
        ...

    def can_record(self, plan: PlanT) -> bool:
        """Whether another step whose uploads have the same shapes asks the same of the device: a
        recording serves both."""
        ...

    def plan(self, packed: Packed) -> PlanT:
        """Set blocks aside for a step. Raises CapacityError with everything as before."""
        ...

    def begin(self, plan: PlanT) -> None:
        """Copy what the step may not write in place."""
        ...

    def commit(self, plan: PlanT, kept: Int64s) -> None:
        """Keep the first kept[i] (S,) new tokens of request i; 0 leaves that sequence as it was."""
        ...

    def abort(self, plan: PlanT) -> None:
        """Leave every sequence of the step as it was."""
        ...

    def share(self, sources: Int64s, targets: Int64s) -> None:
        """All at once: slot targets[i] becomes what slot sources[i] was. Copies no tensor."""
        ...

    def truncate(self, slot: int, to: int) -> None:
        """Forget tokens from position `to` on: `to` >= horizon(slot), or 0, which forgets all that was fed.
        Copies no tensor.
        """
        ...

    def release(self, slot: int) -> None:
        """Give back everything the slot holds."""
        ...

    def horizon(self, slot: int) -> int:
        """The earliest position that `truncate` reaches."""
        ...

    def horizon_after(self, packed: Packed) -> Int64s:
        """(S,) what `horizon` will be once the step's tokens are kept."""
        ...

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        """Pool name -> ids of the blocks this slot refers to."""
        ...

    def live_rows(self, slot: int, length: int) -> LiveRows:
        """Of the blocks of `blocks_of`, in that order, what the slot's `length` tokens may still be read from.

        All else in them was left by whoever had them before, or by tokens that were taken back: it does not leave the
        memory.
        """
        ...

    def holdings(self, slots: Int64s) -> list[Holding]:
        """The blocks of `blocks_of` for many slots (S,), and what they are to them."""
        ...

    def record(self, slot: int) -> Record:
        """What `adopt` needs beside the blocks of `blocks_of`."""
        ...

    def adopt(self, slot: int, record: Record, blocks: dict[str, Int64s]) -> None:
        """An empty slot becomes what `record` was taken of, over blocks with the same bytes; their references pass to
        it.

        A record that makes no sense may raise anything, before a reference has passed.
        """
        ...

    def check_slot(self, slot: int, length: int, peak: int) -> None:
        """As `check`, of one slot with this length and furthest position; what it costs depends on no other slot."""
        ...

    def check(self, lengths: dict[int, int], peaks: dict[int, int]) -> None:
        """Raise IntegrityError if the books of the given slots (and of no others) do not balance."""
        ...
