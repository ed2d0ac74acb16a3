"""Contains the generation loop of all decoders: feed tokens, choose from the logits, commit, and keep the choice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, TypeVar

from torch import Tensor

from hybridmem.memory import HybridMemory, Sequence, Step
from hybridmem.memory.chunked_prefill import run_in_chunks
from hybridmem.memory.recorded import run_recorded
from hybridmem.memory.sequences import count_tokens, uninterrupted_call
from hybridmem.memory.step import Outputs
from hybridmem.models import LanguageModel

ChosenT = TypeVar("ChosenT")


class Mode(Protocol[ChosenT]):
    """Defines what a decoder feeds, how it chooses tokens, and what it does with the choice.

    Attributes:
        outputs: the logits that the mode needs: those of the "last" token of each sequence, or of "all" tokens.
    """

    outputs: Outputs

    def requests(self) -> dict[Sequence, list[int]]:
        """Return the tokens to feed in the next step. The dict is empty if there is no next step."""
        ...

    def choose(self, logits: Tensor, step: Step | None) -> ChosenT:
        """Choose from the logits of a step. The step may still fail, so change nothing, except by `step.accept`.

        `step` is None if the tokens were fed in chunks, which have been committed already.
        """
        ...

    def keep(self, chosen: ChosenT) -> None:
        """Keep the choice. The step has been committed, and a Ctrl-C waits until this returns."""
        ...


def decode(model: LanguageModel, memory: HybridMemory, mode: Mode[Any], *, step_tokens: int = 512) -> None:
    """Feed, choose and keep until the mode has no more requests. Arguments and errors as `feed`."""
    while requests := mode.requests():
        feed(model, memory, mode, requests, step_tokens=step_tokens)


def feed(
    model: LanguageModel, memory: HybridMemory, mode: Mode[ChosenT], requests: dict[Sequence, list[int]], *,
    step_tokens: int,
) -> None:  # fmt: skip
    """Feed the requests, choose and keep.

    Args:
        step_tokens: a request with more tokens is fed in several steps, all of them or none. The mode then gets the
            logits of last tokens only, even if it needs all.
    Raises:
        As `HybridMemory.run`. The sequences and the mode are as before, and the call can be repeated.
    """
    # This holds a Ctrl-C back, once the tokens are committed and until this function returns.
    held = uninterrupted_call(holds_all=True)
    if count_tokens(list(requests.values())).sum() <= step_tokens:
        take_step(model, memory.step(requests, outputs=mode.outputs), mode.choose, mode.keep, held)
        return
    # Chunks need a checkpoint of each sequence, to undo all of them. A short step does without.
    with ExitStack() as commit:
        rows_SV = run_in_chunks(memory, model, requests, max_tokens=step_tokens, outputs="last", held=held)
        commit.push(held)
        assert rows_SV is not None, "only a dry run has no logits"
        mode.keep(mode.choose(rows_SV, None))


def take_step(
    model: Callable[[Step], Tensor], step: Step, choose: Callable[[Tensor, Step], ChosenT],
    keep: Callable[[ChosenT], None], held: AbstractContextManager[Any],
) -> None:  # fmt: skip
    """Run the model on a step, choose, commit and keep.

    Args:
        held: holds a Ctrl-C back from the commit until `keep` has returned, so that both are done or neither.
    """
    with ExitStack() as commit:
        with step:
            is_recordable = getattr(model, "is_recordable", False)
            chosen = choose(run_recorded(model, step) if is_recordable else model(step), step)
            commit.enter_context(held)
        keep(chosen)
