"""Finds the tokens for which two models choose the same experts. 16 bits choose others where two scores are close."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from hybridmem.memory import HybridMemory
from hybridmem.models import LanguageModel


def with_choices(
    model: LanguageModel, memory: HybridMemory, steps: Iterable[list[int]], patch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """Feed a new sequence in these steps. Return the logits of all tokens (T, V), and their experts (T, C).

    The experts are those of all layers. Without experts, C is 0.
    """
    sequence, logits, choices, topk = memory.open(), list[Tensor](), list[Tensor](), Tensor.topk
    for tokens in steps:
        chosen = [torch.empty(len(tokens), 0, dtype=torch.int64)]

        def note(x: Tensor, *arguments: int, chosen: list[Tensor] = chosen, n: int = len(tokens)) -> object:
            found = topk(x, *arguments)
            if len(found.indices) == n:
                chosen.append(found.indices.flatten(1).sort(-1).values)
            return found

        with patch.context() as here, memory.step({sequence: tokens}, outputs="all") as step:
            here.setattr(Tensor, "topk", note)
            logits.append(model(step))
        choices.append(torch.cat(chosen, 1))
    return torch.cat(logits), torch.cat(choices)


def alike(one_TC: Tensor, other_TC: Tensor) -> Tensor:
    """Return which tokens have the same experts (T,), at least half of them."""
    same_T = (one_TC == other_TC).all(-1)
    assert same_T.sum() >= len(same_T) / 2
    return same_T
