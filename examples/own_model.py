"""Gives a model of your own a memory: the model only has to call `step.attend` and `step.recur`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from hybridmem import AttentionSpec, HybridMemory, MemorySpec, RecurrentSpec, StateTensor, Step
from hybridmem.memory.recurrences import Fold

VOCAB, WIDTH, HEADS = 50, 32, 4
generator = torch.Generator().manual_seed(0)


def weight(n_outputs: int, n_inputs: int = WIDTH) -> Tensor:
    return torch.randn(n_outputs, n_inputs, generator=generator) / n_inputs**0.5


def leaky(states: tuple[Tensor, ...], row: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Compute one token of S sequences: return next states and outputs from states (S, WIDTH) and rows (S, WIDTH)."""
    (h,) = states
    h = 0.9 * h + 0.1 * row
    return (h,), h


class Model:
    """Has one attention layer and one recurrent layer."""

    def __init__(self) -> None:
        self.embedding, self.qkv, self.out = weight(VOCAB), weight(3 * WIDTH), weight(WIDTH)
        self.memory_spec = MemorySpec(
            (
                (AttentionSpec(HEADS, HEADS, WIDTH // HEADS),),
                (RecurrentSpec("leaky", (WIDTH,), (StateTensor("h", (WIDTH,)),)),),
            ),
            VOCAB,
        )

    def __call__(self, step: Step) -> Tensor:
        x = self.embedding[step.token_ids]  # (T, WIDTH): tokens of all sequences, packed
        q, k, v = linear(x, self.qkv).view(len(x), 3, HEADS, -1).unbind(1)
        x = x + linear(step.attend(0, q, k, v).flatten(1), self.out)
        x = x + step.recur(1, torch.tanh(x), Fold(leaky))
        return linear(step.select(x), self.embedding)


model = Model()
memory = HybridMemory(model.memory_spec, budget="16MiB", rollback_window=8)
kept, went_back = memory.open(), memory.open()
memory.run(model, {kept: [1, 2, 3], went_back: [1, 2, 3, 40, 41]})
memory.rollback(went_back, to=3)
logits = memory.run(model, {kept: [4], went_back: [4]})
print("largest difference after going back:", float((logits[0] - logits[1]).abs().max()))
