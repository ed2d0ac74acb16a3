"""Defines the adapter of this library's own memories, for any model with a `memory_spec`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.errors import CapacityError, RollbackError, SpecError
from hybridmem.memory.eviction import EvictionPolicy
from hybridmem.memory.hybrid import HybridMemory
from hybridmem.memory.interface import Encoded, Sequence
from hybridmem.memory.sequences.folding import FoldPoints, TailRules
from hybridmem.memory.specs import AttentionSpec, MemorySpec, RecurrentSpec
from hybridmem.memory.step import Step
from hybridmem.memory.testing.adapter import AbsentError, Adapter, Agreement, InjectedError, Logits, RefusedError

_ROUNDING = {torch.float32: 1e-5}
"""The largest difference that is allowed, divided by the spread of the logits. For dtypes of 16 bits it is 2e-2."""


class HybridAdapter(Adapter):
    """Passes the kit's calls on to a new `HybridMemory`.

    Args:
        model: step -> logits.
        spec: the spec of the memory, for example with policies or storages. The default is the model's spec.
        same_bits: True if a row of the model's outputs has the same bits in any batch; see `Agreement`. If False,
            differences up to 1e-5 for float32 and 2e-2 for other dtypes are allowed. With policies or storages, it
            matters how tokens are cut into steps.
        encoder: the encoder's output with which each sequence is opened, for a model with an encoder.
        options: arguments of `HybridMemory`. The defaults are budget="2MiB", rollback_window=8, page_tokens=4,
            poison=True.
    """

    def __init__(
        self,
        model: Any,
        spec: MemorySpec | None = None,
        *,
        same_bits: bool = False,
        encoder: Encoded | None = None,
        **options: Any,
    ) -> None:
        spec = spec or model.memory_spec
        usual: dict[str, Any] = {"budget": "2MiB", "rollback_window": 8, "page_tokens": 4, "poison": True}
        self.memory = HybridMemory(spec, **(usual | options))
        self.vocab_size = spec.vocab_size
        rounding, reproducible = _ROUNDING.get(spec.dtype, 2e-2), self.memory.spec.reproducible
        self.agreement = Agreement(rounding, forgets(spec), same_bits, reproducible)
        self.model, self._encoder = model, encoder
        self._events = Counter(dict.fromkeys(_events_of(self.memory), 0))

    def open(self) -> Sequence:
        opened: Sequence = _ask(self.memory.open, encoder=self._encoder)
        return opened

    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        with self._entered(requests) as step:
            if fail_after is not None:
                _fail(step, fail_after)
            rows = step.split(self.model(step))
        return [part.float().numpy(force=True) for part in rows]

    def accept(self, sequence: Any, tokens: list[int], n_kept: int) -> Logits:
        with self._entered({sequence: tokens}) as step:
            logits: Tensor = self.model(step)
            _ask(step.accept, {sequence: n_kept})
        accepted: Logits = logits.float().numpy(force=True)
        return accepted

    def branch(self, sequence: Any, tokens: list[int], parents: list[int], path: list[int]) -> Logits:
        try:
            self.memory.step({sequence: tokens}, parents={sequence: parents})
        except SpecError as error:
            raise AbsentError(str(error)) from error
        with self._entered({sequence: tokens}, parents={sequence: parents}) as step:
            logits: Tensor = self.model(step)
            _ask(step.accept, {sequence: path})
        found: Logits = logits.float().numpy(force=True)
        return found

    @contextmanager
    def _entered(self, requests: Mapping[Any, list[int]], **options: Any) -> Iterator[Step]:
        """Enter a step, which the memory may refuse.

        An error inside the step is a fault of the model, or of a policy or a recurrence that it runs.
        """
        before = {sequence: self.length(sequence) for sequence in requests}
        with ExitStack() as stack:
            yield _ask(stack.enter_context, self.memory.step(requests, outputs="all", **options))
        for sequence, start in before.items():
            ends = _events_of(self.memory, self.length(sequence))
            self._events.update(ends)
            self._events.subtract(_events_of(self.memory, start))

    def close(self, sequence: Any) -> None:
        _ask(self.memory.close, sequence)

    def length(self, sequence: Any) -> int:
        return int(sequence.length)

    def rollback(self, sequence: Any, to: int) -> None:
        _ask(self.memory.rollback, sequence, to=to)

    def checkpoint(self, sequence: Any) -> Sequence:
        checkpoint: Sequence = _ask(self.memory.checkpoint, sequence)
        return checkpoint

    def return_to(self, sequence: Any, checkpoint: Any) -> None:
        _ask(self.memory.rollback, sequence, to=checkpoint)

    def fork(self, sequence: Any) -> Sequence:
        fork: Sequence = _ask(self.memory.fork, sequence)
        return fork

    def reorder(self, moves: Mapping[Any, Any]) -> None:
        _ask(self.memory.reorder, moves)

    def save(self, sequence: Any, path: Path) -> None:
        _ask(self.memory.save, sequence, path)

    def load(self, path: Path) -> Sequence:
        loaded: Sequence = _ask(self.memory.load, path)
        return loaded

    def usage(self) -> int:
        return self.memory.budget - self.memory.free_bytes

    def can(self, call: str, *arguments: Any) -> bool | None:
        return self.memory.can_rollback(*arguments) if call == "rollback" else None

    def events(self) -> Mapping[str, int]:
        return self._events

    def check(self) -> None:
        self.memory.check()


def forgets(spec: MemorySpec) -> bool:
    """Return True if old rows are evicted or rounded, because outputs then depend on how tokens are cut into steps."""
    attention = [memory for layer in spec.layers for memory in layer if isinstance(memory, AttentionSpec)]
    return any(isinstance(spec.policy, EvictionPolicy) or spec.storage is not None for spec in attention)


def _events_of(memory: HybridMemory, length: int = 0) -> dict[str, int]:
    """Return how often each event happens while a sequence of this memory grows to a length."""
    found, window = dict[str, int](), memory.rollback_window
    specs = [spec for layer in memory.spec.layers for spec in layer]
    if any(isinstance(spec, RecurrentSpec) for spec in specs):
        found["folds of states"] = _passed(TailRules.of(memory.fold, window).points, length)
    for spec in specs:
        if not isinstance(spec, AttentionSpec):
            continue
        if isinstance(spec.policy, EvictionPolicy):
            points = FoldPoints(window, spec.policy.every)
            n_rows = _passed(points, length) * spec.policy.every
            found["rows evicted"] = max(0, n_rows - spec.policy.budget_tokens)
        else:
            found["pages filled"] = length // memory.page_tokens
        if spec.storage is not None:
            found["groups rounded"] = _passed(FoldPoints(window, spec.storage.group), length)
    return found


def _passed(points: FoldPoints, length: int) -> int:
    return int(points.count(np.array([length]))[0])


def _ask(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call the memory. A lack of room, or a rollback that does not reach, is a refusal.

    Every other error is a fault, because the kit makes no other call that may be refused.
    """
    try:
        return call(*arguments, **options)
    except (CapacityError, RollbackError) as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error


def _fail(step: Step, after: int) -> None:
    """Let a step fail when this many of its layers have run."""
    n_left = after

    def failing(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*arguments: Any, **options: Any) -> Tensor:
            nonlocal n_left
            if not n_left:
                raise InjectedError
            n_left -= 1
            return call(*arguments, **options)

        return run

    for name in ("attend", "choose", "recur", "cross_attend"):
        setattr(step, name, failing(getattr(step, name)))
