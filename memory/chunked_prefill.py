"""Feeds requests of any size in steps of bounded size, all or nothing: chunked prefill."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Any, Protocol
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.arguments import is_integer
from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.ends import ExitOnStack
from hybridmem.memory.blocks.hints import OF_TRANSFORMERS, is_of_transformers
from hybridmem.memory.errors import BatchError, CapacityError, StepError
from hybridmem.memory.interface import Requests, Sequence
from hybridmem.memory.sequences.batch import count_tokens, read_pairs, read_tokens
from hybridmem.memory.sequences.chunks import cut_anywhere, cut_on_grid
from hybridmem.memory.sequences.interrupts import uninterrupted_call
from hybridmem.memory.specs import MemorySpec
from hybridmem.memory.step import Outputs, Step
from hybridmem.memory.views.counters import Counters

Model = Callable[[Step], Tensor]
Chunk = list[tuple[int, int, int]]
"""A list of (request, start, end): the tokens of each request that one step takes."""


class Steppable(Protocol):
    """Declares what chunked prefill calls of a memory. `memory.HybridMemory` has more."""

    spec: MemorySpec
    counters: Counters

    def step(self, requests: Requests, *, outputs: Outputs = "last") -> Step: ...


class Run:
    """Is a context manager for several steps that succeed or fail together.

    It makes a checkpoint of each sequence. If an exception ends the `with` block, each sequence returns to its
    checkpoint.

    Args:
        step: a step over all these sequences. It need not have been entered.
    """

    def __init__(self, step: Step) -> None:
        self._owner, self._sequences = step.owner, step.sequences
        self._block: ref[Any] | None = None

    def __enter__(self) -> None:
        self._opened = self._owner.begin_run(self._sequences, self._block)

    __exit__ = ExitOnStack()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._owner.end_run(self._opened, is_complete=kind is None)


def _check(memory: Steppable, model: Model | None, max_tokens: int) -> None:
    """Raise BatchError or StepError unless these arguments of `HybridMemory.run` can work."""
    if not is_integer(max_tokens, 1):
        raise BatchError(f"max_tokens={max_tokens!r}; a step needs at least 1 token")
    if model is None and memory.spec.device.type != "meta":
        raise StepError("model=None runs only on a memory with device='meta'; pass the model")
    if is_of_transformers(model):
        raise StepError(f"{type(model).__name__} is {OF_TRANSFORMERS}")
    if model is not None and not callable(model):
        raise StepError(f"{model!r} is no model; call memory.run(model, requests), with a model from load_model")


def run_in_chunks(
    memory: Steppable, model: Model | None, requests: Requests, *, max_tokens: int, outputs: Outputs,
    held: uninterrupted_call,
) -> Tensor | None:  # fmt: skip
    """Feed requests in steps of at most `max_tokens` tokens, or cut on the grid of 512 positions.

    See `HybridMemory.run`.

    Args:
        held: a context manager that is entered before the last commit. From then on a Ctrl-C waits until the caller
            lets it go.
    """
    _check(memory, model, max_tokens)
    if isinstance(outputs, tuple):
        raise BatchError(f"outputs={outputs!r}; choose 'last' or 'all' where requests are cut into steps")
    sequences, values = read_pairs(requests)
    # Refuse too many tokens before they are read, because reading a million takes long.
    memory.counters.require_room(sequences, count_tokens(values), max_tokens)
    tokens = read_tokens(sequences, values, memory.spec.vocab_size, memory.spec.soft_tokens)
    tokens.arrive(sequences, memory.spec.vocab_size)
    # This step is never entered: making it refuses bad handles and options before anything is computed.
    probe = memory.step([(sequence, 0) for sequence in sequences], outputs=outputs)
    rows: dict[Sequence, list[Tensor]] = {sequence: [] for sequence in sequences}
    first, *later = split_requests(sequences, tokens.counts, max_tokens, on_grid=memory.spec.is_cut_on_grid)
    last = later[-1] if later else first
    is_in_model = False

    def feed(chunk: Chunk, stack: ExitStack) -> None:
        nonlocal is_in_model
        with memory.step([(sequences[i], tokens[i][start:end]) for i, start, end in chunk], outputs=outputs) as step:
            is_in_model = True
            parts = None if model is None else step.split(model(step))
            if chunk is last:
                stack.enter_context(held)  # noqa: F821 - it is deleted after the last call
        is_in_model = False
        for (i, _, end), part in zip(chunk, parts or [None] * len(chunk), strict=True):
            if part is not None and (outputs == "all" or end == len(tokens[i])):
                rows[sequences[i]].append(part)

    try:
        # A single step is all or nothing without a `Run`.
        with ExitStack() as stack, Run(probe) if later else nullcontext():
            for chunk in (first, *later):
                feed(chunk, stack)
            found = [part for sequence in sequences for part in rows[sequence]]
            outcome = None if model is None else torch.cat(found)
            if later:
                held.deliver()
        del held  # An error that somebody keeps would keep it.
        return outcome
    except CapacityError as error:
        if not is_in_model:  # The error counts one chunk; report the whole request.
            slots = np.array([s.slot for s in sequences])
            raise memory.counters.lack_of_room(slots, tokens.counts, max_tokens, error) from None
        raise


def split_requests(sequences: list[Sequence], counts: Int64s, max_tokens: int, *, on_grid: bool) -> list[Chunk]:
    """Cut requests of counts (S,) tokens for these sequences into steps. Short requests come first."""
    order = counts.argsort(kind="stable")
    if on_grid:
        lengths = np.array([sequence.length for sequence in sequences])
        chunks = cut_on_grid(lengths[order], counts[order], max_tokens)
    else:
        chunks = cut_anywhere(counts[order], max_tokens)
    steps: list[Chunk] = [[] for _ in range(int(chunks.steps.max()) + 1)]
    owners = order[chunks.requests]
    for step, *chunk in zip(*(x.tolist() for x in (chunks.steps, owners, chunks.starts, chunks.ends)), strict=True):
        steps[step].append((chunk[0], chunk[1], chunk[2]))
    return steps
