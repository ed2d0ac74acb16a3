"""A small hybrid with the vocabulary of the embedded tokenizer.

It is fast, says the same in any batch, and makes no sense.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hybridmem.chat.prompts import Tokenizer, load_tokenizer
from hybridmem.memory import AttentionSpec, MemorySpec, RecurrentSpec, StateTensor, Step
from hybridmem.memory.recurrences import Fold
from hybridmem.memory.testing.toys import average, project
from hybridmem.models import EMBEDDED

_STATE = (StateTensor("mean", (8,)), StateTensor("highest", (8,), initial=-3.0))


class Speaker:
    """Is a model of one attention layer and one recurrence, over random embeddings."""

    def __init__(self, vocab_size: int) -> None:
        self._embedding = torch.randn(vocab_size, 8, generator=torch.Generator().manual_seed(5))
        self.config = None
        layers = ((AttentionSpec(2, 1, 4),), (RecurrentSpec("average", (8,), _STATE),))
        self.memory_spec = MemorySpec(layers, vocab_size, model="speaker")

    def __call__(self, step: Step) -> Tensor:
        step.check_model(self.memory_spec)
        x = self._embedding[step.token_ids]
        k = x[:, None, :4]
        x = x + step.attend(0, x.reshape(len(x), 2, 4), k, k).flatten(1)
        return project(step.select(step.recur(1, x, Fold(average))), self._embedding)


@cache
def tokenizer_of_speaker() -> Tokenizer:
    return load_tokenizer(EMBEDDED)


@cache
def speaker() -> Speaker:
    return Speaker(len(tokenizer_of_speaker()))
