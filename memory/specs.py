"""What a model needs remembered: one spec for each memory of each layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memory.blocks.arguments import read_count, read_device, read_dtype
from memory.errors import SpecError, StepError
from memory.rotary import Rotation

if TYPE_CHECKING:
    from memory.eviction import Budget
    from memory.quantization import Storage


def _check_shape(what: str, shape: object) -> None:
    if not isinstance(shape, tuple):
        raise SpecError(f"{what} has the shape {shape!r}; give a tuple of sizes, such as (128,)")
    for size in shape:
        read_count(f"a size in the shape {shape} of {what}", size, 1)


@dataclass(frozen=True)
class AttentionSpec:
    """One attention of a layer: a token is remembered as `n_kv_heads` keys and values of `head_dim` elements each.

    Grouped-query attention: query head h reads key/value head h // (n_query_heads / n_kv_heads).

    Attributes:
        window: a token sees only the last `window` tokens, itself included, and older ones are not kept beyond what a
            rollback may need; None for all.
        policy: which old rows are kept, or read; None for all. See `MemorySpec.with_policy`.
        storage: how old rows are kept; None for as they came. See `MemorySpec.with_storage`.
        value_dim: None if values are rows of their own. Else a token is remembered by its keys alone, and a value is
            the first `value_dim` elements of its key: multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"),
            where all query heads read one row, a latent and a rotary key.
        rotation: how the keys given to `Step.attend` carry positions; `memory.UNROTATED` if they do not. None where
            that is not known or positions are elsewhere, as in BART: then tokens cannot be dropped from the middle of a
            sequence.
        has_bias: whether `Step.attend` will be given a bias by distance. It needs every row, so no policy suits it.
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
    has_bias: bool = False

    def __post_init__(self) -> None:
        if self.window is not None:
            read_count("AttentionSpec.window", self.window, 1, "token")
        for size in ("n_query_heads", "n_kv_heads", "head_dim"):
            read_count(f"AttentionSpec.{size}", getattr(self, size), 1)
        if self.n_query_heads % self.n_kv_heads:
            raise SpecError(f"{self.n_query_heads} query heads cannot share {self.n_kv_heads} key/value heads evenly")
        if self.value_dim is not None:
            read_count("AttentionSpec.value_dim", self.value_dim, 1)
            if self.value_dim > self.head_dim:
                raise SpecError(
                    f"value_dim is {self.value_dim}, but values are a part of keys of {self.head_dim}; give that many "
                    "at most"
                )
            if self.storage is not None:
                raise SpecError(
                    f"{self.name!r} keeps latents, few as they are; {self.storage} suits attention with values of its "
                    "own"
                )
        for what, choice in (("policies", self.policy), ("storages", self.storage)):
            if self.window is not None and choice is not None:
                raise SpecError(
                    f"{self.name!r} has a window of {self.window} tokens; {what} like {choice} suit attention without "
                    "one"
                )
        if self.has_bias and self.policy is not None:
            raise SpecError(
                f"scores of {self.name!r} have a bias by distance, which needs every row; {self.policy} suits "
                "attention without"
            )
        if self.rotation is not None and not (
            isinstance(self.rotation, Rotation) and self.rotation.end <= self.head_dim
        ):
            raise SpecError(
                f"{self.rotation!r} does not turn pairs of the {self.head_dim} elements of a head of {self.name!r}; "
                "give a memory.Rotation that does, memory.UNROTATED, or None if it is not known"
            )

    @property
    def n_parts(self) -> int:
        """Rows of `n_kv_heads` heads that a token is remembered as: keys and values, or keys alone."""
        return 2 if self.value_dim is None else 1

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Shape of the keys, or of the values, of a token: (heads, head_dim)."""
        return self.n_kv_heads, self.head_dim

    def check_rows(
        self,
        n_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor | None,
    ) -> None:
        """Raise StepError unless a layer's queries, keys and values are what this spec and its memory expect."""
        if self.value_dim is None and v_TGD is None:
            raise StepError("v is missing; only an attention whose spec has a value_dim takes its values from its keys")
        if self.value_dim is not None and v_TGD is not None:
            raise StepError(
                f"v is given, but values of this attention are the first {self.value_dim} elements of its keys; leave "
                "v out"
            )
        for name, tensor, heads in (
            ("q", q_THD, self.n_query_heads),
            ("k", k_TGD, self.n_kv_heads),
            ("v", v_TGD, self.n_kv_heads),
        ):
            if tensor is None:
                continue
            if tensor.shape != (n_tokens, heads, self.head_dim):
                raise StepError(
                    f"{name} has shape {tuple(tensor.shape)}; this attention expects {(n_tokens, heads, self.head_dim)}"
                )
            if tensor.dtype != dtype or tensor.device.type != device.type:
                raise StepError(f"{name} is {tensor.dtype} on {tensor.device}; this memory holds {dtype} on {device}")


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a recurrence's state.

    Attributes:
        dtype: None means the memory's own.
        initial: fills it at position 0.
        keeps_dtype: whatever `HybridMemory(state_dtype=...)` asks for; for numbers that stand in an exponent.
        ring: what must be remembered of the tokens after it so that it can be left behind them (`memory.kernels.Tail`):
            (shape, dtype) of each part, dtype None for the memory's own; () if their rows are enough; None if it must
            stand at the newest token.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = torch.float32
    initial: float = 0.0
    keeps_dtype: bool = False
    ring: tuple[tuple[tuple[int, ...], torch.dtype | None], ...] | None = field(default=None, repr=False)


def matrix_tensor(
    name: str,
    n_heads: int,
    value_dim: int,
    key_dim: int,
    n_key_heads: int,
    *,
    decays_keys: bool = False,
    has_b: bool = False,
) -> StateTensor:
    """The state of `Kernels.matrix_scan`, (H, V, N).
    Its ring holds what a token does to it, which is to be added up: a key and what is written to it, and a decay of
    each head, or of each key channel; where `Erase` has b, also b and what was found."""
    decays = (n_heads, key_dim) if decays_keys else (n_heads,)
    ring = [((n_key_heads, key_dim), None), ((n_heads, value_dim), None), (decays, torch.float32)]
    erased = [((n_heads, key_dim), None), ((n_heads, value_dim), None)]
    return StateTensor(name, (n_heads, value_dim, key_dim), ring=(*ring, *(erased if has_b else ())))


@dataclass(frozen=True)
class RecurrentSpec:
    """One recurrence of a layer: the shape of its raw input row, and everything it carries from token to token."""

    family: str
    row_shape: tuple[int, ...]
    states: tuple[StateTensor, ...]
    name: str = "recurrence"

    @property
    def can_defer(self) -> bool:
        """Whether all its states can be left behind the newest token."""
        return all(state.ring is not None for state in self.states)

    def has_rows(self, *, deferred: bool) -> bool:
        """Whether a tail holds a token's row.
        States that are left behind ask for that, or for what the token did to them.
        """
        return not deferred or any(state.ring == () for state in self.states)

    def tail_parts(self, *, deferred: bool) -> list[tuple[tuple[int, ...], torch.dtype | None]]:
        """Of each token in a tail, (shape, dtype), dtype None for the memory's own: its row, if there, then the rings
        of its states.
        """
        rows = [(self.row_shape, None)] if self.has_rows(deferred=deferred) else []
        return [*rows, *(part for state in self.states for part in state.ring or () if deferred)]

    def __post_init__(self) -> None:
        if not self.states:
            raise SpecError(f"{self.family!r} has no state tensor; a layer that carries nothing needs no memory")
        if wrong := [state for state in self.states if not isinstance(state, StateTensor)]:
            raise SpecError(f"{wrong[0]!r} is no state of {self.family!r}; give memory.StateTensor(name, shape)")
        names = [state.name for state in self.states]
        if len({"row", *names}) != len(names) + 1:
            raise SpecError(
                f"state tensors of {self.family!r} share a name: {names}; give each its own, and none the name 'row'"
            )
        _check_shape(f"a row of {self.family!r}", self.row_shape)
        for state in self.states:
            _check_shape(f"the state {state.name!r} of {self.family!r}", state.shape)


@dataclass(frozen=True)
class CrossAttentionSpec:
    """One attention of a layer to what an encoder said: written when a sequence is opened, as long as the encoder's
    input.

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
        layers: entry i holds the specs of layer i; names are unique within a layer. Tuples, or lists, which become
            tuples.
        vocab_size: token ids are 0 <= id < vocab_size.
        dtype: of K/V rows, of recurrence rows and of states that name none: float32, bfloat16 or float16, itself or its
            name.
        device: where the memory lives, itself or its name.
        model: a label for messages.
    """

    layers: tuple[tuple[LayerSpec, ...], ...]
    vocab_size: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    model: str = "model"

    def __post_init__(self) -> None:
        read_count("vocab_size", self.vocab_size, 1)
        object.__setattr__(self, "dtype", read_dtype("dtype", self.dtype))
        object.__setattr__(self, "device", read_device("device", self.device))
        if not isinstance(self.layers, tuple | list):
            raise SpecError(f"layers={self.layers!r}; give a tuple with a tuple of specs for each layer")
        object.__setattr__(
            self, "layers", tuple(tuple(specs) if isinstance(specs, list) else specs for specs in self.layers)
        )
        for layer, specs in enumerate(self.layers):
            if not isinstance(specs, tuple):
                raise SpecError(f"layer {layer} is {specs!r}; give a tuple of specs for each layer, () for none")
            if wrong := [spec for spec in specs if not isinstance(spec, LayerSpec)]:
                raise SpecError(
                    f"{wrong[0]!r} in layer {layer} is no spec; give an AttentionSpec, CrossAttentionSpec or "
                    "RecurrentSpec"
                )
            if len({s.name for s in specs}) != len(specs):
                raise SpecError(f"memories of layer {layer} share a name: {[s.name for s in specs]}; give each its own")

    @staticmethod
    def kind_of(memory: LayerSpec) -> str:
        if isinstance(memory, RecurrentSpec):
            return "recurrence"
        return "attention" if isinstance(memory, AttentionSpec) else "cross-attention"

    def of_kind(self, kind: str) -> list[tuple[int, LayerSpec]]:
        """All memories of a kind with their layers, in layer order: their number is a memory's index
        within its kind."""
        return [(layer, m) for layer, specs in enumerate(self.layers) for m in specs if self.kind_of(m) == kind]

    def with_state_dtype(self, dtype: str | torch.dtype | None) -> MemorySpec:
        """The same, with all state tensors that name a dtype in this one. None leaves them as they are."""
        if dtype is None:
            return self
        wanted = read_dtype("state_dtype", dtype, "None for the model's own, ")

        def change(memory: LayerSpec) -> LayerSpec:
            if not isinstance(memory, RecurrentSpec):
                return memory
            return replace(
                memory,
                states=tuple(
                    s if s.dtype is None or s.keeps_dtype else replace(s, dtype=wanted) for s in memory.states
                ),
            )

        return replace(self, layers=tuple(tuple(map(change, layer)) for layer in self.layers))

    def with_policy(self, policy: Budget | None, *, layers: Iterable[int] | None = None) -> MemorySpec:
        """The same, with attention that keeps, or reads, what `policy` (of `memory.eviction`) chooses, or everything
        again (None).

        `spec.with_policy(H2O(1024), layers=range(4, 32))`; several calls give different layers different policies.

        Args:
            layers: whose attention is meant; unless given, all that has no window.
        Raises:
            SpecError: a layer that does not exist, has no attention, or has a window.
        """
        return self._with_attention(layers, policy=policy)

    def with_storage(self, storage: Storage | None, *, layers: Iterable[int] | None = None) -> MemorySpec:
        """The same, with attention that keeps old rows in few bits (`memory.quantization`), or as they came again
        (None).

        `spec.with_policy(H2O(1024)).with_storage(Quantized(4))` keeps 1,024 old rows in 4 bits a number; `layers` and
        errors as there.
        """
        return self._with_attention(layers, storage=storage)

    def _with_attention(self, layers: Iterable[int] | None, **changes: Budget | Storage | None) -> MemorySpec:
        attention = [
            layer
            for layer, memory in self.of_kind("attention")
            if isinstance(memory, AttentionSpec) and memory.window is None
        ]
        if not isinstance(layers, Iterable | None):
            raise SpecError(f"layers={layers!r}; give several, such as layers=[{layers!r}]")
        chosen = attention if layers is None else list(layers)
        for layer in chosen:
            if layer not in attention:
                raise SpecError(
                    f"layer {layer!r} of {self.model} has no attention without a window; choose from {attention}"
                )

        def change(layer: int, memory: LayerSpec) -> LayerSpec:
            if layer in chosen and isinstance(memory, AttentionSpec) and memory.window is None:
                return replace(memory, **changes)  # type: ignore[arg-type]
            return memory

        return replace(
            self, layers=tuple(tuple(change(layer, m) for m in memories) for layer, memories in enumerate(self.layers))
        )

    def same_memories(self, other: MemorySpec) -> bool:
        """Whether both describe the same memories and tokens, whatever their device and dtype, and however they keep
        old rows.
        """
        if self.vocab_size != other.vocab_size or self.layers == other.layers:
            return self.vocab_size == other.vocab_size
        plain = (spec.with_state_dtype(torch.float32).with_policy(None).with_storage(None) for spec in (self, other))
        return next(plain).layers == next(plain).layers
