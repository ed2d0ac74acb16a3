"""Defines the step: one pass of a model over new tokens of any number of sequences, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol
from weakref import ref

import torch
from torch import Tensor

from hybridmem.memory.blocks.arguments import is_integer
from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.copying import refuse_to_copy
from hybridmem.memory.blocks.ends import ExitOnStack
from hybridmem.memory.blocks.scoped import without_gradients
from hybridmem.memory.blocks.staging import object_to_replays
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.errors import BatchError, RollbackError, SequenceError, StepError
from hybridmem.memory.interface import OpenStep, Packed, Plans, Sequence
from hybridmem.memory.kernels import Scoring
from hybridmem.memory.layer_memories import LayerMemories, Place, PlaceKey, Places, SettlesTrees
from hybridmem.memory.sequences.batch import TokenLists, check_row_counts, output_rows, row_counts
from hybridmem.memory.sequences.choosing import ChosenRows
from hybridmem.memory.sequences.soft_tokens import FIRST_SOFT_ID, Run, has_soft, rotary_positions
from hybridmem.memory.specs import AttentionSpec, MemorySpec
from hybridmem.memory.state.access import Recurrence, States
from hybridmem.memory.step_checks import check_scale, check_scoring, check_served, check_tensors

Outputs = Literal["last", "all"]
Rows = Outputs | tuple[int, ...]  # A tuple says for each request how many of its last tokens have outputs.

FEW_TOKENS, FEW_OUTPUTS = 16, 32
"""A step of a model is recorded if its requests have at most this many tokens, unless the caller says otherwise.

The kernels of longer steps take so long that launching them costs little in comparison. Of steps that return more than
their last rows, such as those that verify drafts, the second number counts: their lengths recur more often than those
of prompts.
"""


class PositionsBack(Protocol):
    """Declares what a step reads of the ledger."""

    backs: Int64s
    peaks: Int64s


class StepOwner(Protocol):
    """Declares what a step reads and calls of its memory. `memory.coordinator.Coordinator` has more.

    Attributes:
        checked_spec: the spec of the model that ran last. It fits, so later steps need not compare it again.
        trees: what takes steps over trees of drafts, once there was one (`memory.trees.memories.TreeMemories`).
    """

    spec: MemorySpec
    checked_spec: MemorySpec
    layers: LayerMemories
    places: Places
    store: Store
    trees: Any

    @property
    def ledger(self) -> PositionsBack: ...
    def begin(self, step: Step) -> None: ...
    def commit(self, opened: OpenStep, kept: Int64s) -> None: ...
    def abort(self, opened: OpenStep) -> None: ...
    def settle(self, opened: OpenStep, accepted: Packed, trees: SettlesTrees) -> None: ...
    def begin_run(self, sequences: list[Sequence], block: ref[Any] | None) -> Any: ...
    def end_run(self, run: Any, *, is_complete: bool) -> None: ...
    def want_stages(self) -> None: ...


class Step:
    """Feeds new tokens to a model, all or nothing: `with memory.step(requests) as step: logits = model(step)`.

    Entering allocates blocks and may refuse (CapacityError, BatchError, SequenceError). Leaving it normally commits:
    all sequences move on at once. Leaving it by an exception aborts: every sequence is as it was. A Ctrl-C that comes
    during the commit waits until the commit is done.

    Attributes, once entered:
        token_ids, positions: (T,) int64 on the memory's device, packed in the step's own order. Copy what is needed
            after the step: the next step may overwrite them. For a row of a picture, token_ids has the placeholder
            of `MemorySpec.soft_tokens`.
        rotary_positions: (T,) what to rotate by; or (axes, T) if pictures have several axes and are in this step.
        cu_seqlens: (S + 1,) int64 on the host. The step's request i has tokens [cu_seqlens[i], cu_seqlens[i + 1]).
        sequences: the sequences, in the caller's order.
        notes: a dict in which layers pass values to later layers of this step, such as rotary angles. Each layer uses
            keys of its own. Stored elsewhere, the values of steps in two threads would be mixed up. The dict is emptied
            at the step's end.
    """

    def __init__(self, owner: StepOwner, sequences: list[Sequence], tokens: TokenLists, outputs: Rows) -> None:
        if outputs not in ("last", "all"):
            check_row_counts(outputs, tokens.counts)
        self.sequences, self.tokens, self.outputs = sequences, tokens, outputs
        self.notes: dict[Hashable, Any] = {}
        # The reference is weak: a finished step in some variable must not keep the memory alive.
        self._owner_or_none = ref(owner)
        self._accepted: dict[Sequence, int] = {}
        self._opened: OpenStep | None = None
        self._block: ref[Any] | None = None
        self._served: set[Place] = set()
        self._begun: set[Place] = set()  # These recurrences have run, and may have overwritten their start states.
        self._is_spent = False
        self._soft_runs: list[Run] = []

    __reduce_ex__ = refuse_to_copy("make a step where the memory is")

    @property
    def owner(self) -> StepOwner:
        """Return the coordinator of the memory. Raises StepError if the memory is gone."""
        if (owner := self._owner_or_none()) is None:
            raise StepError("the memory of this step is gone; keep the memory as long as its steps are used")
        return owner

    def __enter__(self) -> Step:
        if self._is_spent:
            raise StepError("this step has been entered before; make a new one with memory.step(...)")
        self._is_spent = True
        try:
            self.owner.begin(self)
            if self.tokens.late is not None:
                # These tokens are checked only when the step is left. Until then, clamp them for the model's embedding.
                last = self.owner.spec.vocab_size - 1
                self.token_ids[self._late_rows] = self.tokens.late.on_device.clamp(0, last).to(self.token_ids.device)
        except BaseException:
            self._abort()
            raise
        return self

    __exit__ = ExitOnStack()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        packed = (opened := self._entered()).packed
        try:
            if error is not None:
                return
            if self.owner.spec.device.type != "meta":
                check_served(self._places, self._served)
            if self.tokens.late is not None:
                self.tokens.arrive(self.sequences, self.owner.spec.vocab_size)
                packed.token_ids[output_rows(packed, "all")] = self.tokens.flat
            self.owner.commit(opened, self._kept(packed))
        finally:
            self._abort()

    def _kept(self, packed: Packed) -> Int64s:
        """Return (S,) how many tokens of each request are kept."""
        kept = packed.counts.copy()
        for sequence, n_tokens in self._accepted.items():
            kept[packed.place[self.sequences.index(sequence)]] = n_tokens
        return kept

    @property
    def scope(self) -> ref[Any]:
        """Return a weak reference to an object that lives until the step's `with` block is left."""
        return ref(self) if self._block is None or self._block() is None else self._block

    @property
    def _places(self) -> Places:
        """Return the places that serve the model's calls. A step that held them would keep the memory's bytes alive."""
        return self.owner.places

    def plan(self, layers: LayerMemories, packed: Packed) -> tuple[Packed, Plans]:
        """Let all layer memories plan and begin this step. Return the step as they have planned it, and their plans."""
        return packed, layers.begin(packed)

    def hold(self, opened: OpenStep, upload: Callable[[Int64s], Tensor]) -> None:
        """Take over the blocks that the memory has allocated. From now on this step must commit or abort."""
        self._opened, packed = opened, opened.packed
        # These are copies, because a model may write to them.
        token_ids = packed.token_ids.copy()
        soft = self.owner.spec.soft_tokens
        if soft is not None and has_soft(token_ids):
            self._soft_runs = [*soft.runs(token_ids)]
            token_ids[token_ids >= FIRST_SOFT_ID] = soft.placeholder_id
        self.token_ids, self.positions = upload(token_ids), upload(packed.positions.copy())
        self.rotary_positions = self.positions
        if soft is not None and soft.n_axes > 1:
            rotary = rotary_positions(packed, self.owner.ledger.backs[packed.slots], self._soft_runs, soft.n_axes)
            self.rotary_positions = upload(rotary.reshape(-1)).view(rotary.shape)
        self.cu_seqlens = packed.cu_seqlens.copy()
        self._output_rows = upload(output_rows(packed, self.outputs))
        if self.tokens.late is not None:
            self._late_rows = upload(output_rows(packed, "all"))

    def _abort(self) -> None:
        """Leave every sequence as it was, unless the step is already committed or aborted."""
        self.notes.clear()
        self._served.clear()
        self._begun.clear()
        if self._opened is not None and not self._opened.is_settled:
            with suppress(SequenceError):  # Its memory is gone, or belongs to another process.
                self.owner.abort(self._opened)

    # Models call the methods below.

    def check_model(self, spec: MemorySpec) -> None:
        """Raise StepError unless this step is open and its memory was made for a model of this spec."""
        self._entered()
        if spec is not self.owner.checked_spec:
            self.owner.spec.check_model(spec)
            self.owner.checked_spec = spec

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None = None, *, scale: float | None = None,
        softcap: float | None = None, sinks: Tensor | None = None, bias: Tensor | None = None, name: str | None = None,
        chosen: ChosenRows | None = None,
    ) -> Tensor:  # fmt: skip
        """Store keys and values, and let each query attend to all tokens of its request up to its own.

        Args:
            layer: the index in `MemorySpec.layers`.
            q, k, v: (T, n_query_heads, head_dim) for q, and (T, n_kv_heads, head_dim) for k and v. If the model
                rotates, q and k are rotated already. v is None if the spec has a `value_dim`: then values are the first
                elements of the keys.
            scale: the factor on the scores, above 0. By default it is 1 / sqrt(head_dim).
            softcap: scores become softcap * tanh(score / softcap), as in Gemma 2.
            sinks: (n_query_heads,) float32, as in gpt-oss: for each head, a score that takes part in the softmax but
                has no value.
            bias: (n_query_heads, L) float32, as in T5, or (T, n_query_heads, L). Column min(d, L - 1) is added to the
                score of the row d tokens before a query.
            name: which of the layer's attentions, if it has several.
            chosen: the rows that each query attends to, from `choose`, if the spec has a number of them (`n_chosen`).
        Returns (T, n_query_heads, head_dim, or value_dim where the spec has one), before the output projection. Raises
        StepError if a shape, dtype or device is not that of the spec, or at a second call for the same memory.
        """
        place, plan = self._claim(layer, name, "attention")
        check_tensors(q=q, k=k, **({} if v is None else {"v": v}))
        with without_gradients():
            check_scoring(q, scale, softcap, sinks, bias)
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            scoring, v = Scoring(scale, None, softcap, sinks, bias), None if v is None else v.detach()
            given = (plan, place.number, q.detach(), k.detach(), v, scoring)
            if self._check_chosen(layer, name, chosen) is None:
                y: Tensor = place.memory.attend(*given)
            else:
                y = place.memory.attend_chosen(*given, chosen)
        self._served.add(place)
        return y

    def _check_chosen(self, layer: int, name: str | None, chosen: ChosenRows | None) -> ChosenRows | None:
        """Return the rows. Raises StepError unless rows are given to an attention that has an index, and only then."""
        own = (m for m in self.owner.spec.layers[layer] if isinstance(m, AttentionSpec) and name in (None, m.name))
        if (next(own).n_chosen is None) != (chosen is None) or not isinstance(chosen, ChosenRows | None):
            raise StepError(
                f"chosen={chosen!r}; give what `choose` of this step returns to an attention whose spec has n_chosen, "
                "and nothing to others"
            )
        return chosen

    def choose(
        self, layer: int, q: Tensor, k: Tensor, weights: Tensor, *, scale: float | None = None, name: str | None = None
    ) -> ChosenRows:
        """Remember the keys of an index, and choose the rows that each token attends to, among those up to itself.

        Args:
            layer: the index in `MemorySpec.layers`.
            q, k: (T, n_query_heads, head_dim) and (T, 1, head_dim), of the index; rotated if the model rotates them.
            weights: (T, n_query_heads) float32, the weight of each head in the score of a row.
            scale: the factor on products of queries and keys, above 0. By default it is 1 / sqrt(head_dim).
            name: which of the layer's indexes, if it has several.
        Returns what `attend` takes as `chosen`, also in later layers of this step. Raises StepError as `attend` does.
        """
        place, plan = self._claim(layer, name, "index")
        check_tensors(q=q, k=k, weights=weights)
        with without_gradients():
            check_scale(scale)
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            rows: ChosenRows = place.memory.choose_rows(
                plan, place.number, q.detach(), k.detach(), weights.detach(), scale
            )
        self._served.add(place)
        return rows

    def cross_attend(self, layer: int, q: Tensor, *, scale: float | None = None, name: str | None = None) -> Tensor:
        """Attend to the encoder's output of each request: q and the result are (T, n_query_heads, head_dim).

        See `attend`.
        """
        place, plan = self._claim(layer, name, "cross-attention")
        check_tensors(q=q)
        with without_gradients():
            check_scale(scale)
            scoring = Scoring(q.shape[-1] ** -0.5 if scale is None else scale)
            y: Tensor = place.memory.cross_attend(plan, place.number, q.detach(), scoring)
        self._served.add(place)
        return y

    def recur(self, layer: int, rows: Tensor, recurrence: Recurrence, *, name: str | None = None) -> Tensor:
        """Run a recurrence over the step's rows, and remember the rows. It starts from each sequence's newest state.

        Args:
            layer: index in `MemorySpec.layers`.
            rows: (T, *row_shape), the recurrence's raw input. It must be enough to compute the state again.
            recurrence: (states, rows) -> (outputs, states). It owns the layer's weights, and may be called several
                times. The memory keeps the last recurrence, because making a checkpoint may call it between steps.
            name: which of the layer's recurrences is meant, if it has several.
        Returns the outputs, (T, ...). Raises StepError as `attend` does, and if the recurrence did not write its end
        states, or has raised an exception in this step.
        """
        place, plan = self._claim(layer, name, "recurrence")
        check_tensors(rows=rows)
        if not callable(recurrence):
            raise StepError(f"recurrence={recurrence!r} cannot be called; give a function of (states, rows)")
        if place in self._begun:
            raise StepError(
                f"the recurrence {name or place.position} of layer {layer} has begun in this step before, and may have "
                "written over the states that it would begin with; leave the step by this error, which leaves every "
                "sequence as it was, and feed the tokens again"
            )

        def begin(states: States, rows: Tensor) -> tuple[Tensor, States]:
            self._begun.add(place)
            return recurrence(states, rows)

        with without_gradients():
            y: Tensor = place.memory.recur(plan, place.number, rows.detach(), begin)
        place.memory.remember(place.number, recurrence)
        self._served.add(place)
        return y

    def embed(self, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the inputs of the first layer, (T, M): `look_up(token_ids)`, with the rows of soft tokens in place."""
        self._entered()
        x_TM = look_up(self.token_ids)
        for run in self._soft_runs:
            rows = run.passage.rows[run.row : run.row + run.n]
            if rows.shape[1] != x_TM.shape[1]:
                raise StepError(f"rows of a picture have {rows.shape[1]} elements, the model's have {x_TM.shape[1]}")
            x_TM[run.at : run.at + run.n] = rows.to(x_TM)
        return x_TM

    def select(self, hidden: Tensor, outputs: Rows | None = None) -> Tensor:
        """Return rows of hidden (T, ...) in the caller's order: as `outputs` says, by default the step's own."""
        packed = self._entered().packed
        rows = self._output_rows if outputs is None else torch.from_numpy(output_rows(packed, outputs))
        return hidden[rows.to(hidden.device)]

    # Recordings (`memory.recorded`) call the methods below.

    def layout(self, most_tokens: int | None = None) -> Hashable | None:
        """Return a key for recordings of this step.

        Steps with the same key launch the same kernels at the same addresses. None: this step cannot be replayed, or a
        request has more than `most_tokens` tokens, by default `FEW_TOKENS` or `FEW_OUTPUTS`.
        """
        opened = self._entered()
        counts, place = opened.packed.counts, None if opened.stage is None else opened.stage.layout
        if most_tokens is None:
            most_tokens = FEW_TOKENS if self.outputs == "last" else FEW_OUTPUTS
        is_of_few = counts[0] <= most_tokens and (counts == counts[0]).all() and not self._soft_runs
        if place is None or self._served or not is_of_few or not self.owner.layers.can_capture(opened.plans):
            return None
        return place, int(counts[0]), self.outputs

    def recordings_of(self, model: object, make: Callable[[], Any]) -> Any:
        """Return the memory's recordings of a model's steps. None if plans are not at fixed addresses.

        `make` creates the recordings at the first call.
        """
        if self._entered().stage is None:
            self.owner.want_stages()
            return None
        return self.owner.store.stages.recordings_of(model, make)

    @property
    def is_open(self) -> bool:
        """True while this step is entered and not left."""
        return self._opened is not None and not self._opened.is_settled

    @property
    def served(self) -> frozenset[PlaceKey]:
        """Return which layer memories were used in this step."""
        return frozenset(key for key, place in self._places.items() if place in self._served)

    def serve(self, served: frozenset[PlaceKey]) -> None:
        """Mark layer memories as used in this step, because a replayed recording has used them."""
        self._entered()
        self._served = set(map(self._places.__getitem__, served))

    def watched(self) -> Step:
        """Return this step in a form for a model that is recorded.

        It raises an error when the model reads values that differ between steps.
        """
        self._entered()
        twin = object.__new__(_WatchedStep)
        twin.__dict__ = vars(self)
        return twin

    @contextmanager
    def while_captured(self) -> Iterator[Step]:
        """Yield a copy of this step for a capture.

        A capture computes nothing, so this step does not count as used by it.
        """
        self._entered()
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), _served=set(), _begun=set(), notes={})
        try:
            yield twin
        finally:
            twin._opened = None  # Only the step itself may commit or abort.
            twin.notes.clear()

    # Callers use the methods below.

    def split(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of this step for each request, in the caller's order.

        Each has one row, or one for each token, or as many as `outputs` says.
        """
        counts = row_counts(self.outputs, self.tokens.counts)
        n_rows = len(logits) if isinstance(logits, Tensor) and logits.dim() else None
        if n_rows != sum(counts):
            what = repr(logits) if n_rows is None else f"{n_rows} rows"
            raise BatchError(f"{what} are not the {sum(counts)} rows of this step's outputs={self.outputs!r}")
        return torch.split(logits, counts)

    def accept(self, accepted: Mapping[Sequence, int | list[int]]) -> None:
        """Keep only the first n tokens fed to each of these sequences; of a tree (`parents=`), those on one path.

        With n = 0, or an empty path, a sequence is as if it had not taken part.

        Raises:
            SequenceError: a sequence is not in this step. BatchError: n is no integer from 0 to the number of tokens
                that the sequence was fed.
            RollbackError: more tokens would be taken back than the rollback window holds.
        """
        packed = self._entered().packed
        if not isinstance(accepted, Mapping):
            raise BatchError(f"{accepted!r} accepts nothing; give {{sequence: number of tokens to keep}}")
        horizons = self.owner.layers.horizons_after(packed)
        for sequence, n_tokens in accepted.items():
            if sequence not in self.sequences:
                raise SequenceError(f"{sequence!r} is not in this step; accept only what was fed")
            i = packed.place[self.sequences.index(sequence)]
            n_fed, start = int(packed.counts[i]), int(packed.starts[i])
            if not is_integer(n_tokens, 0) or n_tokens > n_fed:
                raise BatchError(
                    f"accepting {n_tokens!r} of {n_fed} tokens of {sequence!r}; give an integer from 0 to {n_fed}"
                )
            n_tokens, horizon = int(n_tokens), int(horizons[i])
            if 0 < n_tokens < n_fed and start + n_tokens < horizon:
                raise RollbackError(
                    f"keeping {n_tokens} of {n_fed} tokens of {sequence!r} ends at {start + n_tokens}, before its "
                    f"horizon {horizon}; keep at least {horizon - start}, or 0, or give the memory a larger "
                    "rollback_window",
                    to=start + n_tokens, horizon=horizon, resume_at=start,
                )  # fmt: skip
        self._accepted |= {sequence: int(n) for sequence, n in accepted.items() if is_integer(n)}

    if not TYPE_CHECKING:  # Otherwise a type checker would accept any name.

        def __getattr__(self, name: str) -> object:
            """Raise StepError for what a step has only while it is entered."""
            if name in ("token_ids", "positions", "rotary_positions", "cu_seqlens"):
                self._entered()
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _entered(self) -> OpenStep:
        """Return the open step. Raises StepError unless this step is entered and not left."""
        if self._opened is None or self._opened.is_settled:
            raise StepError("this step is not open; use it inside `with memory.step(...) as step:`")
        return self._opened

    def _claim(self, layer: int, name: str | None, kind: str) -> tuple[Place, Any]:
        """Return place and plan of the layer memory that a call names. Raises StepError if it was used already."""
        opened, spec = self._entered(), self.owner.spec
        if spec.device.type == "meta":
            raise StepError("a dry run has no tensors; leave the model out of the step")
        place = self._places.get((layer, kind, name)) if isinstance(layer, int) else None
        if place is None:
            if not isinstance(layer, int) or not 0 <= layer < len(spec.layers):
                raise StepError(f"layer {layer!r} does not exist; {spec.model} has layers 0 ... {len(spec.layers) - 1}")
            names = [s.name for s in spec.layers[layer] if spec.kind_of(s) == kind]
            raise StepError(f"layer {layer} has {len(names)} {kind} memories {names}; name={name!r} picks none of them")
        if place in self._served:
            raise StepError(
                f"the {kind} memory {name or place.position} of layer {layer} was used twice in one step; a model runs "
                "once in each: make another step for the next tokens"
            )
        return place, opened.plans[place.group]


class _WatchedStep(Step):
    """Shares the attributes of a step that is recorded, and refuses to give those that recordings lack."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("sequences", "tokens"):
            object_to_replays(f"the model reads step.{name}, which other steps have otherwise")
        return super().__getattribute__(name)
