"""The loss that training computes, and its gradients, equal those of transformers' own model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import JambaForCausalLM

from tests.extent import only_in_long
from tests.models.families.jamba import jamba_config
from training.fused import loss_of
from training.train_embedded import IGNORED

_APART = 0.08
"""Of the length of a gradient: products in bfloat16 round each factor to 0.4 %."""


@pytest.fixture(scope="module")
def both() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return loss and gradients of a small Jamba with both kinds of layers, by transformers and by our loops."""
    torch.manual_seed(0)
    sizes = {"num_experts": 1, "num_experts_per_tok": 1, "hidden_size": 48, "mamba_d_state": 4}
    config = jamba_config(**sizes, tie_word_embeddings=True)
    model = JambaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # No gradient should be small by symmetry.
    ids = torch.randint(config.vocab_size, (2, 9))
    labels = torch.where(torch.rand(2, 9) < 0.3, IGNORED, ids)

    def run(loss: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return found | {"loss": loss.detach()}

    return run(model(ids, labels=labels, use_cache=False).loss), run(loss_of(model, ids, labels))


@only_in_long
def test_loss_and_gradients_are_those_of_the_model(both: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    expected, actual = both
    assert actual.keys() == expected.keys()
    apart = {name: float((actual[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    assert not {name: share for name, share in apart.items() if not share <= _APART}
