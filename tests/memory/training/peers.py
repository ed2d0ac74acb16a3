"""Models of transformers whose gradients ours are compared with."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.checkpoints import CONFIGS, auto_class, randomise_

_SHARE = 0.3
"""How far weights are from those of an initialisation on the way to those of `randomise_`. Further on, float32 itself
loses more digits than the comparison allows: transformers' own gradients in float32 and float64 differ by more.
"""


_MILDER = {"kimi-linear-two-of-eight-experts-in-groups": 0.2, "lfm3": 0.2, "glm5-next-single-rows": 0.2}
"""The same where transformers' own gradients in float32 are off by 1.2e-5 to 1.6e-5 at the share of the others."""


def random_model(name: str) -> Any:
    """A model in float32 in which every weight matters."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = auto_class(config).from_config(config).eval().float()
    initial = [parameter.clone() for parameter in model.parameters()]
    randomise_(model)
    with torch.no_grad():
        for parameter, first in zip(model.parameters(), initial, strict=True):
            parameter.lerp_(first, 1 - _MILDER.get(name, _SHARE))
    return model


def reference_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy in float64, without those forms of transformers that compute no gradients, or lose digits."""
    twin: Any = copy.deepcopy(model).double()
    if twin._can_set_experts_implementation():
        twin.set_experts_implementation("eager")  # The default multiplies float32 at most.
    for part in twin.modules():
        if isinstance(part, nn.Embedding):
            part.padding_idx = None  # Otherwise the embedding of this token would learn nothing.
    module = sys.modules[type(twin).__module__]
    if hasattr(module, "torch_chunk_gated_delta_rule"):
        # It subtracts sums of logarithms in float32, whatever the dtype. Token by token it does not.
        one_by_one = module.torch_recurrent_gated_delta_rule
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", lambda *a, chunk_size=64, **k: one_by_one(*a, **k))
    return twin


def logprobs(model: Any, tokens: Sequence[int], since: int) -> Tensor:
    """Logarithms of the probabilities of tokens from `since` on, by transformers over the whole text."""
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, max(0, since - 1) : -1]
    return -torch.nn.functional.cross_entropy(logits.double(), torch.tensor(tokens[max(1, since) :]), reduction="none")


def worst(model: nn.Module, reference: nn.Module) -> tuple[float, str]:
    """The largest difference of two gradients, of the largest number of its tensor; and the name of that tensor."""
    found = (0.0, "none")
    for (name, own), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None or not expected.grad.any():
            assert own.grad is None or not own.grad.any(), name
            continue
        assert own.grad is not None, f"{name} has no gradient"
        error = (own.grad - expected.grad).abs().max() / expected.grad.abs().max()
        found = max(found, (float(error), name))
    return found
