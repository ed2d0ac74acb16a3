"""Runs one of this library's models as the engine does, without importing another library's models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from hybridmem.memory import HybridMemory, Sequence
from hybridmem.memory.recorded import run_recorded
from hybridmem.memory.sequences.folding import Fold
from hybridmem.models import LanguageModel

VOCAB = 32_000

N_UNTIMED = 8
"""Decode steps before those that are timed: the first of a layout are recorded, which takes longer than to run."""


def draw(n_sequences: int, n_tokens: int) -> Tensor:
    return torch.randint(0, VOCAB, (n_sequences, n_tokens), generator=torch.Generator().manual_seed(1))


def workload(*, quick: bool) -> tuple[tuple[int, int], ...]:
    """Return pairs: how many sequences are prefilled and decoded together, and how many tokens each prompt has."""
    return ((1, 16), (8, 8)) if quick else ((1, 512), (8, 64), (32, 64))


class Ours:
    """Holds sequences of one memory, which are prefilled or stepped together.

    Args:
        records: whether decode steps are recorded, as the engine's are.
    """

    def __init__(
        self, model: LanguageModel, n_sequences: int, *, rollback_window: int = 32, budget: str = "6GiB",
        fold: Fold | None = None, state_dtype: str | None = None, records: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.records = model, records
        self.memory = HybridMemory(
            model.memory_spec, budget, rollback_window=rollback_window, fold=fold, state_dtype=state_dtype
        )
        self.sequences: list[Sequence] = [self.memory.open() for _ in range(n_sequences)]
        self.next = [5] * n_sequences

    def prefill(self, tokens: Tensor) -> None:
        for sequence in self.sequences:
            self.memory.rollback(sequence, to=0)
        with self.memory.step(zip(self.sequences, tokens, strict=True)) as step:
            self.model(step)

    def rewind(self, n_tokens: int) -> None:
        """Give all sequences a new prompt of so many tokens, as if they were new."""
        for sequence in self.sequences:
            self.memory.rollback(sequence, to=0)
        self.fill(draw(len(self.sequences), n_tokens))

    def fill(self, tokens: Tensor) -> None:
        """Prefill prompts of any lengths."""
        self.memory.run(self.model, zip(self.sequences, tokens, strict=True), max_tokens=2048)

    def decode(self) -> None:
        with self.memory.step(zip(self.sequences, self.next, strict=True)) as step:
            logits = run_recorded(self.model, step) if self.records else self.model(step)
        self.next = logits.max(-1).indices.tolist()  # `max` is several times as fast as `argmax`.


def prefills(subjects: Mapping[str, Ours], tokens: Tensor) -> dict[str, Callable[[], object]]:
    """Return a function for each measured model, by the model's name. All of them prefill the same prompts."""
    return {name: partial(subject.prefill, tokens) for name, subject in subjects.items()}
