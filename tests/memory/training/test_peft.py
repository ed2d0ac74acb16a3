"""PEFT's adapters around a model of transformers are trained through the memory."""

from __future__ import annotations

import pytest
import torch

from hybridmem.memory.kernels.double_precision import precision_for
from hybridmem.memory.training import Tape
from hybridmem.models import Trainable
from tests.memory.training import peers
from tests.models.checkpoints import draw_tokens

peft = pytest.importorskip("peft", reason="pip install peft")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradients_of_lora() -> None:
    tokens = draw_tokens(30)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "x_proj", "in_proj"], init_lora_weights=False, lora_dropout=0
    )
    model = peft.get_peft_model(peers.random_model("jamba", torch.float64), config)
    reference = peers.reference_of(model.get_base_model())
    tape = Tape(Trainable.of(model).model(), chunk_tokens=7)
    text = tape.open()
    tape.run({text: tokens})[text].sum().backward()
    with precision_for(torch.float64):
        torch.autograd.backward(peers.logprobs(reference, tokens, 0).sum())
    error, where = peers.worst(model.get_base_model(), reference)
    assert error <= 1e-10, f"{error} in {where}"
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
