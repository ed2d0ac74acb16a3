"""Implements what nearly all language models are: an embedding, a stack of residual layers, a norm and a head."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from hybridmem.memory import MemorySpec, Step, StepError
from hybridmem.memory.blocks import refuse_attribute, without_gradients
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.layers.linear import add_scaled
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.vision.pictures import Pictures
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Function = Callable[[Tensor], Tensor]


class Mixer(Protocol):
    """Mixes tokens. It is attention, a recurrence, or both."""

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """Return the specs of the memories that it needs."""
        ...

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor: ...


class Layer(Protocol):
    """Computes one layer of a `Decoder`."""

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """Return the specs of the memories that it needs."""
        ...

    def __call__(self, x_TM: Tensor, step: Step, /) -> Tensor: ...


@dataclass(frozen=True)
class Parallel:
    """Sums the outputs of mixers that read the same input."""

    mixers: tuple[Mixer, Mixer]

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return self.mixers[0].specs + self.mixers[1].specs

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        return self.mixers[0](x_TM, step) + self.mixers[1](x_TM, step)


@dataclass(frozen=True)
class Normed:
    """Norms the output of a mixer."""

    mixer: Mixer
    norm: Function

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return self.mixer.specs

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        return self.norm(self.mixer(x_TM, step))


def in_turn(first: Function, second: Function) -> Function:
    """Return the function that computes second(first(x))."""

    def both(x_TM: Tensor) -> Tensor:
        return second(first(x_TM))

    return both


@dataclass(frozen=True)
class Block:
    """Computes x + s mixer(norm(x)), then x + s feed_forward(norm(x)); either part may be missing.

    Attributes:
        mixer, feed_forward: the two parts, each with the norm before it.
        scale: the factor s.
    """

    mixer: tuple[Function, Mixer] | None
    feed_forward: tuple[Function, Function] | None = None
    scale: float = 1.0

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return () if self.mixer is None else self.mixer[1].specs

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        if self.mixer is not None:
            x_TM = self._add(x_TM, *self.mixer, step)
        if self.feed_forward is not None:
            x_TM = self._add(x_TM, *self.feed_forward)
        return x_TM

    def _add(self, x_TM: Tensor, norm: Function, part: Callable[..., Tensor], *arguments: Step) -> Tensor:
        """Return x + scale * part(norm(x)). Parts with `add_to` compute this in fewer calls."""
        if (add_to := getattr(part, "add_to", None)) is not None:
            return add_to(x_TM, norm, *arguments, scale=self.scale)  # type: ignore[no-any-return]
        return add_scaled(x_TM, part(norm(x_TM), *arguments), self.scale)


ForwardT = TypeVar("ForwardT", bound=Callable[..., Tensor | tuple[Tensor, ...]])


def on_step(forward: ForwardT) -> ForwardT:
    """Decorate a model's `__call__(self, step)`, so that it runs without gradients, on an open step of its own memory.

    Any other argument raises StepError, whose message shows the right call.
    """

    @wraps(forward)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            len(args) != 1 or kwargs or not callable(getattr(args[0], "check_model", None))
        ):  # The argument is a step, or an object that is used like one.
            given = ", ".join(
                [*map(reprlib.repr, args), *(f"{name}={reprlib.repr(value)}" for name, value in kwargs.items())]
            )
            raise StepError(
                f"{model.memory_spec.model} was given {given or 'nothing'}, but it runs on a step of a memory; write "
                "`with memory.step({sequence: token_ids}) as step: logits = model(step)`"
            )
        args[0].check_model(model.memory_spec)
        with without_gradients():
            return forward(model, args[0])

    return call  # type: ignore[return-value]


HIDDEN_STATES = "hidden states"
"""A step with this among its notes gives the rows after the last norm instead of logits, for embeddings."""


class Decoder:
    """Computes `logits = model(step)`: (n_requests, vocab) or (n_tokens, vocab) float32, in the caller's order.

    Logits are the sums of the head's product, which are not rounded to the weights' dtype. They are computed only for
    the rows that the step selects: 4 bytes for each token of the vocabulary and row.

    Subclasses load the parts. `residual_dtype` is the dtype of the residual stream. By default, it is float32 on the
    CPU, where that takes no time, and otherwise the dtype of the weights. Each of dozens of layers would round a stream
    of bfloat16: SmolLM2's logits are then 1.5 times as far from those of float32.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        checkpoint: Checkpoint,
        vocabulary: Vocabulary,
        layers: Sequence[Layer],
        norm: Function,
        *,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self._vocabulary, self._layers, self._norm = vocabulary, layers, norm
        if residual_dtype is None:
            residual_dtype = torch.float32 if checkpoint.device.type == "cpu" else checkpoint.dtype
        self.residual_dtype = residual_dtype
        self.memory_spec = MemorySpec(
            layers=tuple(layer.specs for layer in layers), vocab_size=vocabulary.n_tokens, dtype=checkpoint.dtype,
            device=checkpoint.device, model=f"{type(self).__name__} {checkpoint.folder.name}",
        )  # fmt: skip

    gives_hidden_states = True
    draft_head: Any = None
    """The checkpoint's own draft head (`models.draft_heads.DraftHead`), if it was loaded."""
    draft_prefixes: tuple[str, ...] = ("mtp.",)
    """What the names of the draft head's tensors begin with. They are not missed when the head is not loaded."""
    pictures: Pictures | None = None
    """Reads pictures for prompts. None: this model reads text alone, or its checkpoint has no tower."""

    def load_draft_head(self, checkpoint: Checkpoint) -> Any:
        """Return the draft head that the model's checkpoint holds, or None if it holds none.

        Raises UnsupportedModelError if its draft head is not implemented. The message names a tensor of it.
        """
        if (found := checkpoint.first_below(self.draft_prefixes)) is not None:
            raise UnsupportedModelError(
                f"{checkpoint.folder} has a draft head with {found}, and such heads are not implemented for "
                f"{type(self).__name__}; load the model without it"
            )
        return None

    def see(self, pictures: Pictures | None) -> None:
        """Let rows of pictures be fed in place of tokens."""
        if pictures is not None:
            self.pictures = pictures
            pictures.embed = self._vocabulary.embed
            self.memory_spec = replace(self.memory_spec, soft_tokens=pictures.soft_tokens)

    if not TYPE_CHECKING:  # Without this condition, a type checker would accept any name.

        def __getattr__(self, name: str) -> object:
            refuse_attribute(self, "Decoder", name)

    is_recordable = True
    """Declares that a step's logits depend only on its tensors, so that `memory.recorded` may replay them."""

    def hidden_rows(self, step: Step, after: Sequence[int] = ()) -> Tensor:
        """Return the rows that a draft head reads: (T, (len(after) + 1) * M), for an open step's tokens, in its order.

        A row holds the token's residual stream after each of the layers `after`, ascending, and then its hidden state
        after the last norm, from which `vocabulary.logits` makes logits.
        """
        x_TM, kept = step.embed(self._vocabulary.embed).to(self.residual_dtype), []
        for i, layer in enumerate(self._layers):
            x_TM = layer(x_TM, step)
            if i in after:
                kept.append(x_TM.clone())  # Layers may add to it in place.
        normed_TM = self._norm(x_TM)
        return torch.cat([*(x.to(normed_TM.dtype) for x in kept), normed_TM], -1) if kept else normed_TM

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the embedding and the output matrix, which draft heads share."""
        return self._vocabulary

    @on_step
    def __call__(self, step: Step) -> Tensor:
        x_TM = step.embed(self._vocabulary.embed).to(self.residual_dtype)
        for layer in self._layers:
            x_TM = layer(x_TM, step)
        x_TM = self._norm(step.select(x_TM))
        return x_TM if HIDDEN_STATES in step.notes else self._vocabulary.logits(x_TM)
