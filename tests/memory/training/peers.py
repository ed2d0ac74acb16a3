"""Makes models of transformers with whose gradients ours are compared."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridmem.memory.kernels.double_precision import precision_for
from tests.models.checkpoints import CONFIGS, auto_class, randomise_


def random_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model in which every weight matters. What it computes from its config alone, it computes in `dtype`."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    with precision_for(dtype):
        model = auto_class(config).from_config(config, dtype=dtype).eval()
    randomise_(model)
    return model


def in_float64(model: Any, name: str) -> Any:
    """Return a model with the same weights, in float64."""
    exact = random_model(name, torch.float64)
    exact.load_state_dict(model.state_dict())
    return exact


def reference_of(model: Any) -> Any:
    """Return a copy without those forms of transformers that compute no gradients, or lose digits."""
    twin = copy.deepcopy(model)
    if twin._can_set_experts_implementation():
        twin.set_experts_implementation("eager")  # The default multiplies in float32 at most.
    for part in twin.modules():
        if isinstance(part, nn.Embedding):
            part.padding_idx = None  # Otherwise the embedding of this token would learn nothing.
    return twin


def logprobs(model: Any, tokens: Sequence[int], since: int) -> Tensor:
    """Return logarithms of the probabilities of tokens from `since` on, by transformers over the whole text."""
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, max(0, since - 1) : -1]
    return -torch.nn.functional.cross_entropy(logits.double(), torch.tensor(tokens[max(1, since) :]), reduction="none")


def worst(model: nn.Module, reference: nn.Module) -> tuple[float, str]:
    """Return the largest difference of two gradients, and the name of its tensor.

    The difference counts as a share of the largest number of its tensor.
    """
    found = (0.0, "none")
    for (name, own), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None or not expected.grad.any():
            assert own.grad is None or not own.grad.any(), name
            continue
        assert own.grad is not None, f"{name} has no gradient"
        error = (own.grad - expected.grad).abs().max() / expected.grad.abs().max()
        found = max(found, (float(error), name))
    return found


def undo_rescaling(reference: Any) -> None:
    """Turn gradients of weights that RWKV divides in place into gradients of the weights as they were."""
    every = getattr(reference.config, "rescale_every", 0)
    if type(reference).__name__ != "RwkvForCausalLM" or every <= 0:
        return
    for i, block in enumerate(reference.rwkv.blocks):
        for weight in (block.attention.output.weight, block.feed_forward.value.weight):
            weight.grad.div_(2 ** (i // every))
