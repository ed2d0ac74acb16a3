"""What the parts of a memory promise each other: specs, handles, protocols.

Shape legend, used as suffixes of local tensors and arrays everywhere (`k_TGD`):

    S sequences (requests) in this step     T tokens in this step, packed: one flat axis, no padding
    H query heads   G key/value heads       D head dimension    M model (hidden) dimension
    E inner channels of a recurrence        N states a channel  W taps of a convolution
    P tokens a page                         R elements of a row, flattened

Units: `n_*` counts, `*_bytes`, `*_tokens`; positions are token indices and intervals half-open, [start, end).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.errors import SequenceError, SpecError
from memory.shift import DropsTokens, Rotation

if TYPE_CHECKING:
    from memory.arena import BlockPool
    from memory.eviction import Budget
    from memory.quantization import Storage
    from memory.recurrent_state import States

Int64s = NDArray[np.int64]


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{name} is {value!r}; it must be an integer of at least 1")


@dataclass(frozen=True)
class AttentionSpec:
    """One attention of a layer: a token is remembered as `n_kv_heads` keys and values of `head_dim` elements each.

    Grouped-query attention: query head h reads key/value head h // (n_query_heads / n_kv_heads).

    Attributes:
        window: a token sees only the last `window` tokens, itself included, and older ones are not kept beyond what a rollback may
            need; None for all.
        policy: which old rows are kept, or read; None for all. See `MemorySpec.with_policy`.
        storage: how old rows are kept; None for as they came. See `MemorySpec.with_storage`.
        value_dim: None if values are rows of their own. Else a token is remembered by its keys alone, and a value is the first
            `value_dim` elements of its key: multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"), where all query heads read
            one row, a latent and a rotary key.
        rotation: how the keys given to `Step.attend` carry positions; `memory.UNROTATED` if they do not. None where that is not known
            or positions are elsewhere, as in BART: then tokens cannot be dropped from the middle of a sequence.
    """

    n_query_heads: int
    n_kv_heads: int
    head_dim: int
    name: str = "attention"
    window: int | None = None
    policy: Budget | None = None
    storage: Storage | None = None
    value_dim: int | None = None
    rotation: Rotation | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            _check_count("AttentionSpec.window", self.window)
        for size in ("n_query_heads", "n_kv_heads", "head_dim"):
            _check_count(f"AttentionSpec.{size}", getattr(self, size))
        if self.n_query_heads % self.n_kv_heads:
            raise SpecError(f"{self.n_query_heads} query heads cannot share {self.n_kv_heads} key/value heads evenly")
        if self.value_dim is not None:
            _check_count("AttentionSpec.value_dim", self.value_dim)
            if self.value_dim > self.head_dim:
                raise SpecError(f"value_dim is {self.value_dim}, but values are a part of keys of {self.head_dim}; give that many at most")
            if self.storage is not None:
                raise SpecError(f"{self.name!r} keeps latents, few as they are; {self.storage} suits attention with values of its own")
        for what, choice in (("policies", self.policy), ("storages", self.storage)):
            if self.window is not None and choice is not None:
                raise SpecError(f"{self.name!r} has a window of {self.window} tokens; {what} like {choice} suit attention without one")
        if self.rotation is not None and not (isinstance(self.rotation, Rotation) and 2 * len(self.rotation.frequencies) <= self.head_dim):
            raise SpecError(f"{self.rotation!r} does not turn pairs of the {self.head_dim} elements of a head of {self.name!r}")

    @property
    def n_parts(self) -> int:
        """Rows of `n_kv_heads` heads that a token is remembered as: keys and values, or keys alone."""
        return 2 if self.value_dim is None else 1


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a recurrence's state.

    Attributes:
        dtype: None means the memory's own.
        initial: fills it at position 0.
        keeps_dtype: whatever `HybridMemory(state_dtype=...)` asks for; for numbers that stand in an exponent.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = torch.float32
    initial: float = 0.0
    keeps_dtype: bool = False


@dataclass(frozen=True)
class RecurrentSpec:
    """One recurrence of a layer: the shape of its raw input row, and everything it carries from token to token."""

    family: str
    row_shape: tuple[int, ...]
    states: tuple[StateTensor, ...]
    name: str = "recurrence"

    def __post_init__(self) -> None:
        if not self.states:
            raise SpecError(f"{self.family!r} has no state tensor; a layer that carries nothing needs no memory")
        shapes = {"row": self.row_shape} | {s.name: s.shape for s in self.states}
        if len(shapes) != len(self.states) + 1:
            raise SpecError(f"state tensors of {self.family!r} share a name: {[s.name for s in self.states]}")
        for name, shape in shapes.items():
            for size in shape:
                _check_count(f"a size in the shape {shape} of {name!r} of {self.family!r}", size)


@dataclass(frozen=True)
class CrossAttentionSpec:
    """One attention of a layer to what an encoder said: written when a sequence is opened, as long as the encoder's input.

    Heads as in `AttentionSpec`.
    """

    n_query_heads: int
    n_kv_heads: int
    head_dim: int
    name: str = "cross_attention"

    def __post_init__(self) -> None:
        AttentionSpec(self.n_query_heads, self.n_kv_heads, self.head_dim)  # the same rules


LayerSpec = AttentionSpec | CrossAttentionSpec | RecurrentSpec


@dataclass(frozen=True)
class MemorySpec:
    """What a model needs remembered: for each layer the memories it owns, none, one or several.

    Attributes:
        layers: entry i holds the specs of layer i; names are unique within a layer.
        vocab_size: token ids are 0 <= id < vocab_size.
        dtype: of K/V rows, of recurrence rows and of states that name none.
        device: where the memory lives.
        model: a label for messages.
    """

    layers: tuple[tuple[LayerSpec, ...], ...]
    vocab_size: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    model: str = "model"

    def __post_init__(self) -> None:
        _check_count("vocab_size", self.vocab_size)
        for layer, specs in enumerate(self.layers):
            if not isinstance(specs, tuple):
                raise SpecError(f"layer {layer} is {specs!r}; give a tuple of specs for each layer, () for none")
            if len({s.name for s in specs}) != len(specs):
                raise SpecError(f"memories of layer {layer} share a name: {[s.name for s in specs]}; give each its own")

    @staticmethod
    def kind_of(memory: LayerSpec) -> str:
        if isinstance(memory, RecurrentSpec):
            return "recurrence"
        return "attention" if isinstance(memory, AttentionSpec) else "cross-attention"

    def of_kind(self, kind: str) -> list[tuple[int, LayerSpec]]:
        """All memories of a kind with their layers, in layer order: their number is a memory's index within its kind."""
        return [(layer, m) for layer, specs in enumerate(self.layers) for m in specs if self.kind_of(m) == kind]

    def with_state_dtype(self, dtype: torch.dtype | None) -> MemorySpec:
        """The same, with all state tensors that name a dtype in this one. None leaves them as they are."""
        if dtype is None:
            return self

        def change(memory: LayerSpec) -> LayerSpec:
            if not isinstance(memory, RecurrentSpec):
                return memory
            return replace(memory, states=tuple(s if s.dtype is None or s.keeps_dtype else replace(s, dtype=dtype) for s in memory.states))

        return replace(self, layers=tuple(tuple(map(change, layer)) for layer in self.layers))

    def with_policy(self, policy: Budget | None, *, layers: Iterable[int] | None = None) -> MemorySpec:
        """The same, with attention that keeps, or reads, what `policy` (of `memory.eviction`) chooses, or everything again (None).

        `spec.with_policy(H2O(1024), layers=range(4, 32))`; several calls give different layers different policies.

        Args:
            layers: whose attention is meant; unless given, all that has no window.
        Raises:
            SpecError: a layer that does not exist, has no attention, or has a window.
        """
        return self._with_attention(layers, policy=policy)

    def with_storage(self, storage: Storage | None, *, layers: Iterable[int] | None = None) -> MemorySpec:
        """The same, with attention that keeps old rows in few bits (`memory.quantization`), or as they came again (None).

        `spec.with_policy(H2O(1024)).with_storage(Quantized(4))` keeps 1,024 old rows in 4 bits a number; `layers` and errors as there.
        """
        return self._with_attention(layers, storage=storage)

    def _with_attention(self, layers: Iterable[int] | None, **changes: Budget | Storage | None) -> MemorySpec:
        attention = [layer for layer, memory in self.of_kind("attention") if isinstance(memory, AttentionSpec) and memory.window is None]
        chosen = attention if layers is None else list(layers)
        for layer in chosen:
            if layer not in attention:
                raise SpecError(f"layer {layer!r} of {self.model} has no attention without a window; choose from {attention}")

        def change(layer: int, memory: LayerSpec) -> LayerSpec:
            if layer in chosen and isinstance(memory, AttentionSpec) and memory.window is None:
                return replace(memory, **changes)  # type: ignore[arg-type]
            return memory

        return replace(self, layers=tuple(tuple(change(layer, m) for m in memories) for layer, memories in enumerate(self.layers)))

    def same_memories(self, other: MemorySpec) -> bool:
        """Whether both describe the same memories and tokens, whatever their device and dtype, and however they keep old rows."""
        if self.vocab_size != other.vocab_size or self.layers == other.layers:
            return self.vocab_size == other.vocab_size
        plain = (spec.with_state_dtype(torch.float32).with_policy(None).with_storage(None) for spec in (self, other))
        return next(plain).layers == next(plain).layers


class SequenceOwner(Protocol):
    """What a handle asks of the memory that made it."""

    def describe(self, sequence: Sequence) -> tuple[int, Int64s, int]:
        """(length, tokens, horizon) of an open sequence."""
        ...


class Sequence:
    """A handle to one remembered sequence. It is made by a memory and means nothing to another one.

    Attributes:
        id: unique within its memory, never used twice.
        is_checkpoint: True if it is a mark: it can be forked, returned to and closed, not advanced.
    """

    __slots__ = ("__weakref__", "_owner", "closed", "id", "is_checkpoint", "lineage", "slot")

    def __init__(self, owner: SequenceOwner, id: int, slot: int, lineage: int, *, is_checkpoint: bool) -> None:
        self._owner = owner
        self.id = id
        self.slot = slot
        self.lineage = lineage
        self.is_checkpoint = is_checkpoint
        self.closed = False

    @property
    def length(self) -> int:
        """Tokens remembered."""
        return self._described()[0]

    @property
    def tokens(self) -> Int64s:
        """The token ids remembered, int64 (length,): a copy."""
        tokens: Int64s = self._described()[1].copy()
        return tokens

    @property
    def horizon(self) -> int:
        """The earliest position that `rollback` reaches without a checkpoint (position 0 is always reachable)."""
        return self._described()[2]

    def _described(self) -> tuple[int, Int64s, int]:
        if self.closed:
            raise SequenceError(f"sequence {self.id} is closed; open or fork another one")
        return self._owner.describe(self)

    def __repr__(self) -> str:
        kind = "checkpoint" if self.is_checkpoint else "sequence"
        return f"<{kind} {self.id}, {'closed' if self.closed else f'{self.length} tokens'}>"


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


PlanT = TypeVar("PlanT")


class LayerMemory(DropsTokens, Protocol[PlanT]):
    """One kind of memory, for all layers that use it. It is told positions and never keeps one of its own.

    A step is plan -> begin -> (the model runs) -> commit or abort. Only `plan` may refuse.
    """

    @property
    def sized_pools(self) -> list[tuple[BlockPool, int]]:
        """Its pools, each with the padding bytes of one block."""
        ...

    @property
    def least_bytes(self) -> int:
        """What one sequence needs to take a step of one token, at any length up to a page."""
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
        """Forget tokens from position `to` >= horizon(slot) on. Copies no tensor."""
        ...

    def reset(self, slot: int) -> None:
        """Forget all tokens: position 0."""
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

    def check(self, lengths: dict[int, int], peaks: dict[int, int]) -> None:
        """Raise IntegrityError if the books of the given slots (and of no others) do not balance."""
        ...


class Recurrence(Protocol):
    """A fold over rows, owned by a layer of a model: state, y = f(state, row)."""

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Run rows (T, *row_shape), packed by states.cu_rows, from the start states.

        Returns outputs (T, ...) and `states` with its end states written (`states.end` or, for kernels, in place).
        """
        ...
