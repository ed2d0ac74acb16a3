"""Running requests of any size in steps of bounded size, all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from memory.batch import count_tokens, read_pairs, read_tokens
from memory.errors import BUDGET_UNIT, BatchError, CapacityError, StepError
from memory.interface import Int64s, Requests, Sequence
from memory.specs import MemorySpec
from memory.step import Outputs, Step

Model = Callable[[Step], Tensor]


class Steppable(Protocol):
    """What running needs of a memory."""

    spec: MemorySpec

    def require_room(self, sequences: list[Sequence], counts: Int64s, max_tokens: int) -> None: ...
    def lack_of_room(self, slots: Int64s, counts: Int64s, max_tokens: int) -> CapacityError: ...
    def step(self, requests: Requests, *, outputs: Outputs = "last") -> Step: ...
    def checkpoint(self, sequence: Sequence) -> Sequence: ...
    def rollback(self, sequence: Sequence, to: int | Sequence) -> None: ...
    def close(self, sequence: Sequence) -> None: ...


def run_in_chunks(memory: Steppable, model: Model | None, requests: Requests, *, max_tokens: int, outputs: Outputs) -> Tensor | None:
    """See `HybridMemory.run`. A checkpoint of each sequence is held meanwhile; it is what a failure returns to."""
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise BatchError(f"max_tokens={max_tokens!r}; a step needs at least 1 token")
    if model is None and memory.spec.device.type != "meta":
        raise StepError("model=None runs only on a memory with device='meta'; pass the model")
    sequences, values = read_pairs(requests)
    memory.require_room(sequences, count_tokens(values), max_tokens)  # their number is enough: a million tokens take long to read
    tokens = read_tokens(sequences, values, memory.spec.vocab_size)
    tokens.arrive(sequences, memory.spec.vocab_size)
    memory.step([(sequence, 0) for sequence in sequences], outputs=outputs)  # refuses what no chunk could do; nothing is entered
    marks: dict[Sequence, Sequence] = {}
    rows: dict[Sequence, list[Tensor]] = {sequence: [] for sequence in sequences}
    chunks = split_requests(tokens.counts.tolist(), max_tokens)
    is_in_model = False
    try:
        for sequence in sequences if len(chunks) > 1 else []:  # a step alone is all or nothing by itself
            marks[sequence] = memory.checkpoint(sequence)
        for chunk in chunks:
            with memory.step([(sequences[i], tokens[i][start:end]) for i, start, end in chunk], outputs=outputs) as step:
                is_in_model = True
                parts = None if model is None else step.split(model(step))
            is_in_model = False
            for (i, _, end), part in zip(chunk, parts or [None] * len(chunk), strict=True):
                if part is not None and (outputs == "all" or end == len(tokens[i])):
                    rows[sequences[i]].append(part)
    except BaseException as error:
        for sequence, mark in marks.items():
            if not sequence.closed:  # by the model: it is not this run's to bring back
                memory.rollback(sequence, to=mark)
        if isinstance(error, CapacityError) and error.unit == BUDGET_UNIT and not is_in_model:  # it speaks of a chunk
            raise memory.lack_of_room(np.array([s.slot for s in sequences]), tokens.counts, max_tokens) from None
        raise
    finally:
        for mark in marks.values():
            memory.close(mark)
    return None if model is None else torch.cat([part for sequence in sequences for part in rows[sequence]])


def split_requests(counts: list[int], max_tokens: int) -> list[list[tuple[int, int, int]]]:
    """Chunks (request, start, end) for each step, short requests first, `max_tokens` a step until all are done."""
    steps: list[list[tuple[int, int, int]]] = [[]]
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
