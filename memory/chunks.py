"""Running requests of any size in steps of bounded size, all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import torch
from torch import Tensor

from memory.batch import read_requests
from memory.errors import BatchError, StepError
from memory.interface import Requests, Sequence
from memory.interrupts import uninterrupted, uninterrupted_call
from memory.specs import MemorySpec
from memory.step import Outputs, Step

Model = Callable[[Step], Tensor]
Chunk = list[tuple[int, int, int]]
"""(request, start, end) of its tokens."""


class Steppable(Protocol):
    """What running needs of a memory."""

    spec: MemorySpec

    def step(self, requests: Requests, *, outputs: Outputs = "last") -> Step: ...
    def checkpoint(self, sequence: Sequence) -> Sequence: ...
    def rollback(self, sequence: Sequence, to: int | Sequence) -> None: ...
    def close(self, sequence: Sequence) -> None: ...


def run_in_chunks(
    memory: Steppable, model: Model | None, requests: Requests, *, max_tokens: int, outputs: Outputs, held: uninterrupted_call
) -> Tensor | None:
    """See `HybridMemory.run`. Of several steps, a checkpoint of each sequence is held meanwhile; it is what a failure returns to.

    Args:
        held: entered before the last commit. From then on a Ctrl-C waits, for as long as the caller keeps this.
    """
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise BatchError(f"max_tokens={max_tokens!r}; a step needs at least 1 token")
    if model is None and memory.spec.device.type != "meta":
        raise StepError("model=None runs only on a memory with device='meta'; pass the model")
    sequences, tokens = read_requests(requests, memory.spec.vocab_size)
    tokens.arrive(sequences, memory.spec.vocab_size)
    memory.step(list(zip(sequences, tokens, strict=True)), outputs=outputs)  # refuses what no chunk could do; nothing is entered
    marks: dict[Sequence, Sequence] = {}
    rows: dict[Sequence, list[Tensor]] = {sequence: [] for sequence in sequences}
    first, *later = split_requests(tokens.counts.tolist(), max_tokens)
    last = later[-1] if later else first

    def feed(chunk: Chunk, stack: ExitStack) -> None:
        with memory.step([(sequences[i], tokens[i][start:end]) for i, start, end in chunk], outputs=outputs) as step:
            parts = None if model is None else step.split(model(step))
            if chunk is last:
                stack.enter_context(held)
        for (i, _, end), part in zip(chunk, parts or [None] * len(chunk), strict=True):
            if part is not None and (outputs == "all" or end == len(tokens[i])):
                rows[sequences[i]].append(part)

    try:
        try:
            if later:  # a step alone is all or nothing by itself
                with uninterrupted():
                    for sequence in sequences:
                        marks[sequence] = memory.checkpoint(sequence)
            with ExitStack() as stack:
                for chunk in (first, *later):
                    feed(chunk, stack)
                outcome = None if model is None else torch.cat([part for sequence in sequences for part in rows[sequence]])
                if marks:
                    held.deliver()
                for sequence in [*marks]:
                    memory.close(marks.pop(sequence))
                return outcome
        finally:
            _return_to(memory, marks)
    finally:
        _return_to(memory, marks)  # a Ctrl-C may have come in the way of the first


def _return_to(memory: Steppable, marks: dict[Sequence, Sequence]) -> None:
    """Bring sequences back to where their marks stand, if any are left."""
    with uninterrupted():
        while marks:
            sequence, mark = marks.popitem()
            try:
                if not sequence.closed:  # by the model: it is not this run's to bring back
                    memory.rollback(sequence, to=mark)
            finally:
                memory.close(mark)


def split_requests(counts: list[int], max_tokens: int) -> list[Chunk]:
    """Chunks (request, start, end) for each step, short requests first, `max_tokens` a step until all are done."""
    steps: list[Chunk] = [[]]
    left = max_tokens
    for i in sorted(range(len(counts)), key=counts.__getitem__):
        start = 0
        while start < counts[i]:
            if left == 0:
                steps.append([])
                left = max_tokens
            end = min(counts[i], start + left)
            steps[-1].append((i, start, end))
            left -= end - start
            start = end
    return steps
