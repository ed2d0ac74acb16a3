"""Specs say what a model remembers: one for each attention, cross-attention and recurrence of each layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from hybridmem.memory.blocks.arguments import read_count, read_device, read_dtype
from hybridmem.memory.errors import SpecError, StepError
from hybridmem.memory.kernels.eight_bits import EIGHT_BITS, stored_shape
from hybridmem.memory.rotary import Rotation
from hybridmem.memory.sequences.soft_tokens import SoftTokens

if TYPE_CHECKING:
    from hybridmem.memory.eviction import Budget
    from hybridmem.memory.quantization import Storage


def _check_shape(what: str, shape: object) -> None:
    """Raise SpecError unless a shape is a tuple of positive integers."""
    if not isinstance(shape, tuple):
        raise SpecError(f"{what} has the shape {shape!r}; give a tuple of sizes, such as (128,)")
    for size in shape:
        read_count(f"a size in the shape {shape} of {what}", size, 1)


def _check_spans(what: str, n_chosen: int | None, span_tokens: int) -> None:
    """Raise SpecError unless an index chooses whole spans."""
    read_count(f"{what}.span_tokens", span_tokens, 1, "row")
    if span_tokens > 1 and (n_chosen is None or n_chosen % span_tokens):
        raise SpecError(
            f"{what}.n_chosen={n_chosen!r}, span_tokens={span_tokens}; an index chooses whole spans, so give a "
            "multiple of span_tokens as n_chosen"
        )


@dataclass(frozen=True)
class AttentionSpec:
    """Describes one attention of a layer: each token has `n_kv_heads` keys and values of `head_dim` elements.

    Grouped-query attention: query head h reads key/value head h // (n_query_heads / n_kv_heads).

    Attributes:
        window: a token sees only the last `window` tokens, itself included. Older rows are kept only as long as a
            rollback may need them. None: a token sees all earlier ones.
        policy: chooses which old rows are kept, or are read. None: all of them. See `MemorySpec.with_policy`.
        storage: how old rows are stored. None: in the memory's dtype. See `MemorySpec.with_storage`.
        value_dim: None if values are rows of their own. Otherwise only keys are stored, and a value is the first
            `value_dim` elements of its key. Multi-head latent attention does so (DeepSeek-AI 2024, "DeepSeek-V2"): all
            query heads read one row, which is a latent and a rotary key.
        rotation: how the keys given to `Step.attend` carry positions; `memory.UNROTATED` if they carry none. None if
            that is not known, or if positions are elsewhere, as in BART. Then tokens cannot be dropped from the middle
            of a sequence.
        has_bias: True if `Step.attend` is given a bias by distance. That needs every row, so no policy suits it.
        n_chosen: how many rows a query reads at most. An `IndexSpec` of this layer, or of one before, chooses them.
            None: there is no index.
        span_tokens: how many consecutive rows are chosen together: a span. A query also reads the rows after the last
            whole span before it, so up to span_tokens - 1 rows more.
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
    n_chosen: int | None = None
    span_tokens: int = 1

    def __post_init__(self) -> None:
        if self.window is not None:
            read_count("AttentionSpec.window", self.window, 1, "token")
        _check_spans("AttentionSpec", self.n_chosen, self.span_tokens)
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
        if self.n_chosen is not None:
            read_count("AttentionSpec.n_chosen", self.n_chosen, 1, "row")
            others: tuple[tuple[str, object], ...] = (
                ("window", self.window), ("policy", self.policy), ("storage", self.storage),
            )  # fmt: skip
            for what, other in others:
                if other is not None:
                    raise SpecError(
                        f"an index chooses the rows that {self.name!r} reads, so it has every row, as it is; {what} "
                        f"{other} suits attention without an index"
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
        """Return how many rows of `n_kv_heads` heads a token has: 2 for keys and values, or 1 for keys alone."""
        return 2 if self.value_dim is None else 1

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Return the shape of the keys, or of the values, of a token: (n_kv_heads, head_dim)."""
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
        """Raise StepError unless a layer's queries, keys and values have the shapes, dtype and device expected."""
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
    """Describes one tensor of a recurrence's state.

    Attributes:
        dtype: None means the memory's own.
        initial: the value of all elements at position 0.
        keeps_dtype: True if `HybridMemory(state_dtype=...)` must not change the dtype, for example because the numbers
            are exponents.
        ring: what the tail holds of each token in fold mode "defer", which stores this state only at the body
            (`memory.kernels.Tail`). It lists (shape, dtype) of each part, where dtype None means the memory's own. It
            is () if the rows of the tail are enough, and None if "defer" does not work for this state.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = torch.float32
    initial: float = 0.0
    keeps_dtype: bool = False
    ring: tuple[tuple[tuple[int, ...], torch.dtype | None], ...] | None = field(default=None, repr=False)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape in a block, in elements of `dtype`. With 8 bits, each row or channel ends with a scale."""
        return stored_shape(self.shape, self.dtype)


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
    """Make the spec of a matrix state (H, V, N), as `Kernels.matrix_scan` takes it.

    Its ring holds what each token adds to the state: a key, a value that is written to it, and a decay for each head or
    each key channel. For a recurrence with `Erase`, the ring also holds `Erase.b` if there is one, and the value found,
    S a.
    """
    decays = (n_heads, key_dim) if decays_keys else (n_heads,)
    ring = [((n_key_heads, key_dim), None), ((n_heads, value_dim), None), (decays, torch.float32)]
    erased = [((n_heads, key_dim), None), ((n_heads, value_dim), None)]
    return StateTensor(name, (n_heads, value_dim, key_dim), ring=(*ring, *(erased if has_b else ())))


@dataclass(frozen=True)
class RecurrentSpec:
    """Describes one recurrence of a layer: the shape of its raw input row, and the states that it carries."""

    family: str
    row_shape: tuple[int, ...]
    states: tuple[StateTensor, ...]
    name: str = "recurrence"

    @property
    def can_defer(self) -> bool:
        """True if fold mode "defer" works for this recurrence: no step needs its state at the newest token."""
        return all(state.ring is not None for state in self.states)

    @property
    def fits_8_bits(self) -> bool:
        """True if all states but windows of rows have rows, or channels, of several numbers that can share a scale."""
        return all(len(s.shape) in (2, 3) and s.ring if s.dtype is not None else s.ring == () for s in self.states)

    def has_rows(self, *, deferred: bool) -> bool:
        """True if a tail holds the raw rows. With `deferred`, only states with an empty ring need raw rows."""
        return not deferred or any(state.ring == () for state in self.states)

    def tail_parts(self, *, deferred: bool) -> list[tuple[tuple[int, ...], torch.dtype | None]]:
        """Return (shape, dtype) of what a tail holds of a token: its raw row, if needed, and the rings of all states.

        A dtype of None means the memory's own.
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
    """Describes one attention of a layer to an encoder's output, which is written when a sequence is opened.

    Its heads are those of `AttentionSpec`.
    """

    n_query_heads: int
    n_kv_heads: int
    head_dim: int
    name: str = "cross_attention"

    def __post_init__(self) -> None:
        # Heads follow the same rules as in AttentionSpec, whose constructor checks them.
        AttentionSpec(self.n_query_heads, self.n_kv_heads, self.head_dim)


@dataclass(frozen=True)
class IndexSpec:
    """Describes an index of a layer: tokens have small keys, by which queries choose the rows that they attend to.

    A row's score is the sum over heads of weight * relu(scale * query . key), as in DeepSeek-AI 2025, "DeepSeek-V3.2".
    The `n_chosen` rows of the highest scores are chosen, and of equal ones the oldest. See `Step.choose`.

    Attributes:
        n_query_heads, head_dim: of the index. All heads share one key.
        n_chosen: the number of rows that a query chooses at most.
        rotation: see `AttentionSpec`.
        span_tokens: how many consecutive rows, a span, have one key and are chosen together. The key is given to
            `Step.choose` with the last token of the span. It is rotated, if at all, by the position of the first.
    """

    n_query_heads: int
    head_dim: int
    n_chosen: int
    name: str = "index"
    rotation: Rotation | None = None
    span_tokens: int = 1

    n_kv_heads: ClassVar[int] = 1
    n_parts: ClassVar[int] = 1
    window: ClassVar[None] = None

    def __post_init__(self) -> None:
        for size in ("n_query_heads", "head_dim", "n_chosen"):
            read_count(f"IndexSpec.{size}", getattr(self, size), 1)
        _check_spans("IndexSpec", self.n_chosen, self.span_tokens)
        self._as_attention()

    def _as_attention(self) -> AttentionSpec:
        return AttentionSpec(
            self.n_query_heads, 1, self.head_dim, self.name, value_dim=self.head_dim, rotation=self.rotation
        )

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Return the shape of the key of a token."""
        return 1, self.head_dim

    def check_rows(
        self, n_tokens: int, dtype: torch.dtype, device: torch.device, q_THD: Tensor, k_T1D: Tensor, _: None
    ) -> None:
        """Raise StepError unless queries and keys have the shapes, dtype and device expected."""
        self._as_attention().check_rows(n_tokens, dtype, device, q_THD, k_T1D, None)


LayerSpec = AttentionSpec | CrossAttentionSpec | IndexSpec | RecurrentSpec


@dataclass(frozen=True)
class MemorySpec:
    """Describes what a model remembers: for each layer its attentions and recurrences. A layer may have any number.

    Attributes:
        layers: entry i holds the specs of layer i; names are unique within a layer. Lists become tuples.
        vocab_size: token ids are 0 <= id < vocab_size.
        dtype: the dtype of keys and values, of rows of recurrences, and of states whose own dtype is None. It is
            float32, bfloat16 or float16, or the name of one. torch.float64 is for training alone.
        device: the device of the memory's tensors, or its name.
        model: a label for messages.
        weights: a text such as "float32:DIGEST" that tells the model's weights from others of the same shapes. None:
            not known. Saved files of other weights are refused.
        reproducible: True if the model computes a row's logits by the same operations in any step, so that its memory
            can be reproducible. `load_model(reproducible=True)` sets it.
        soft_tokens: finds the rows of embeddings that may be fed in place of tokens, such as those of pictures. None:
            the model takes tokens alone.
    """

    layers: tuple[tuple[LayerSpec, ...], ...]
    vocab_size: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    model: str = "model"
    weights: str | None = field(default=None, compare=False, repr=False)
    soft_tokens: SoftTokens | None = field(default=None, compare=False, repr=False)
    reproducible: bool = False

    def __post_init__(self) -> None:
        read_count("vocab_size", self.vocab_size, 1)
        if self.dtype != torch.float64:
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
                    f"{wrong[0]!r} in layer {layer} is no spec; give an AttentionSpec, CrossAttentionSpec, "
                    "IndexSpec or RecurrentSpec"
                )
            if len({s.name for s in specs}) != len(specs):
                raise SpecError(f"memories of layer {layer} share a name: {[s.name for s in specs]}; give each its own")

    @staticmethod
    def kind_of(memory: LayerSpec) -> str:
        """Return "attention", "cross-attention", "index" or "recurrence"."""
        if isinstance(memory, IndexSpec):
            return "index"
        if isinstance(memory, RecurrentSpec):
            return "recurrence"
        return "attention" if isinstance(memory, AttentionSpec) else "cross-attention"

    def of_kind(self, kind: str) -> list[tuple[int, LayerSpec]]:
        """Return (layer, spec) of all specs of a kind, in layer order."""
        return [(layer, m) for layer, specs in enumerate(self.layers) for m in specs if self.kind_of(m) == kind]

    def with_state_dtype(self, dtype: str | torch.dtype | None) -> MemorySpec:
        """Return the same spec, with this dtype in all state tensors that have a dtype of their own.

        None changes nothing. "int8" and "fp8" are for matrices and for channels of several numbers, so SpecError names
        other families.
        """
        if dtype is None:
            return self
        is_short = dtype in (*EIGHT_BITS, *EIGHT_BITS.values())
        if is_short:
            wanted = EIGHT_BITS[dtype] if isinstance(dtype, str) else dtype
            recurrent = [m for _, m in self.of_kind("recurrence") if isinstance(m, RecurrentSpec)]
            if unable := ", ".join(sorted({m.family for m in recurrent if not m.fits_8_bits})):
                raise SpecError(
                    f"state_dtype={dtype!r} is not for {unable}: 8 bits are for matrices, or several numbers a "
                    "channel, that a step need not write, without a stabiliser; choose 'bfloat16'"
                )
        else:
            wanted = read_dtype("state_dtype", dtype, "None for the model's own, 'int8', 'fp8', ")

        def change(memory: LayerSpec) -> LayerSpec:
            if not isinstance(memory, RecurrentSpec):
                return memory
            keeps = [s.dtype is None or s.keeps_dtype for s in memory.states]
            states = [s if kept else replace(s, dtype=wanted) for s, kept in zip(memory.states, keeps, strict=True)]
            return replace(memory, states=tuple(states))

        return replace(self, layers=tuple(tuple(map(change, layer)) for layer in self.layers))

    @property
    def is_cut_on_grid(self) -> bool:
        """True if `HybridMemory.run` cuts requests on a fixed grid, because the cuts decide which rows tokens see.

        That is so with any policy or storage, as a step reads what was folded before it.
        """
        attention = (m for _, m in self.of_kind("attention") if isinstance(m, AttentionSpec))
        return any(m.policy is not None or m.storage is not None for m in attention)

    def with_policy(self, policy: Budget | None, *, layers: Iterable[int] | None = None) -> MemorySpec:
        """Return the same spec with this eviction policy in attention layers.

        With None, these layers keep all rows again.

        An example is `spec.with_policy(H2O(1024), layers=range(4, 32))`. Call it several times to give layers different
        policies. See `memory.eviction`.

        Args:
            layers: the indices of the layers. The default is all layers whose attention has no window.
        Raises:
            SpecError: a layer does not exist, has no attention, or has a window.
        """
        return self._with_attention(layers, policy=policy)

    def with_storage(self, storage: Storage | None, *, layers: Iterable[int] | None = None) -> MemorySpec:
        """Return the same spec with old rows stored in few bits (`memory.quantization`). With None they keep the dtype.

        `spec.with_policy(H2O(1024)).with_storage(Quantized(4))` keeps 1,024 old rows in 4 bits per number. `layers` and
        errors are those of `with_policy`.
        """
        return self._with_attention(layers, storage=storage)

    def _with_attention(self, layers: Iterable[int] | None, **changes: Budget | Storage | None) -> MemorySpec:
        found = self.of_kind("attention")
        attention = [layer for layer, memory in found if isinstance(memory, AttentionSpec) and memory.window is None]
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
        """True if both specs have the same layers and vocabulary. Device, dtypes, policies and storages may differ."""
        if self.vocab_size != other.vocab_size or self.layers == other.layers:
            return self.vocab_size == other.vocab_size
        plain = (spec.with_state_dtype(torch.float32).with_policy(None).with_storage(None) for spec in (self, other))
        return next(plain).layers == next(plain).layers

    def check_model(self, other: MemorySpec) -> None:
        """Raise StepError unless a model of the spec `other` can run on a memory of this spec."""
        if not self.same_memories(other):
            raise StepError(
                f"this memory was made for {self.model}, not for {other.model}; make one from model.memory_spec"
            )
        if self.reproducible and not other.reproducible:
            raise StepError(
                f"this memory is reproducible, but {other.model} was not loaded with reproducible=True; load it so"
            )
        if (self.dtype, self.device.type) != (other.dtype, other.device.type):
            raise StepError(
                f"this memory holds {self.dtype} on {self.device}, {other.model} runs in {other.dtype} on "
                f"{other.device}; make the memory with the model's dtype and device (leave dtype= and device= of "
                "HybridMemory out), or load the model with those of the memory"
            )
