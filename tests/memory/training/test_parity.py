"""Gradients through the memory against those of transformers' model, by torch over whole texts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridmem.memory.training import Tape
from hybridmem.models import Trainable
from tests.memory.training import peers
from tests.models.checkpoints import CONFIGS, draw_tokens
from tests.subjects import IS_FULL

FAMILIES = (
    "bailing-hybrid", "bamba", "deepseek-v3", "deepseek-v3.2", "falcon-h1", "falcon-mamba", "gemma2", "gemma3",
    "granite-moe-hybrid", "inkling-log-scale", "jamba", "kimi-linear",
    "lara-mini", "lfm2", "llama", "mamba2", "minimax", "mistral",
    "nemotron-h", "olmo-hybrid", "qwen3-next", "qwen3.5", "recurrent-gemma", "rwkv", "rwkv7", "xlstm-biases", "zamba",
    "zamba2", "zaya",
)  # fmt: skip
TOLERANCE = 1e-5
"""Of the largest number of each tensor's gradient."""


def weighted(values: Tensor) -> Tensor:
    """A loss in which every token counts, with a weight of its own."""
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(len(values)))
    return (values * weights).sum()


@pytest.mark.parametrize("name", CONFIGS if IS_FULL else FAMILIES)
@pytest.mark.parametrize("chunk_tokens", (1, 7, 64, 512) if IS_FULL else (7,))
def test_a_text_that_was_rolled_back_and_forked(name: str, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = peers.random_model(name)
    reference = peers.reference_of(model, monkeypatch)
    prompt, dropped, added, other = (draw_tokens(n, seed=n) for n in (20, 9, 5, 6))

    tape = Tape(Trainable.of(model).model(), chunk_tokens=chunk_tokens)
    text = tape.open()
    losses = [weighted(tape.run({text: prompt})[text])]
    twin = tape.fork(text)
    losses.append(weighted(tape.run({text: dropped})[text]))
    tape.rollback(text, to=23)
    found = tape.run({text: added, twin: other})
    sum([*losses, weighted(found[text]), weighted(found[twin])]).backward()

    texts = (prompt, 0), (prompt + dropped, 20), (prompt + dropped[:3] + added, 23), (prompt + other, 20)
    expected = [peers.logprobs(reference, tokens, since) for tokens, since in texts]
    sum(weighted(values) for values in expected).backward()
    for own, values in zip((found[text], found[twin]), expected[2:], strict=True):
        assert torch.allclose(own.double(), values, atol=1e-5)
    error, where = peers.worst(model, reference)
    assert error <= TOLERANCE, f"{error} in {where}"
