"""Gradients through the memory are compared with those of transformers' model, by torch over whole texts.

Both are computed in float64, so that formulas are compared, and not rounding.
"""

from __future__ import annotations

import pytest
import torch

from tests.extent import few_cases, one_in
from tests.memory.training import peers
from tests.memory.training.texts import LONG, MIDDLE, SHORT, Texts, expect_gradients, go_back
from tests.models.checkpoints import CONFIGS
from tests.subjects import IS_FULL

FAMILIES = (
    "bamba", "deepseek-v3.2", "gemma2", "gemma3", "glm5-next", "inkling-log-scale", "jamba", "kimi-linear", "lfm2",
    "minimax", "qwen3-next", "qwen4-exp", "recurrent-gemma", "rwkv", "rwkv7", "xlstm-biases", "zaya",
)  # fmt: skip
"""One of each attention and recurrence."""
TOLERANCE = 1e-10
"""Of the largest number of each tensor's gradient, in float64. Rounding alone is some 1e-14."""


@few_cases
@pytest.mark.parametrize("name", CONFIGS if IS_FULL else one_in(3, FAMILIES))
@pytest.mark.parametrize("texts", (SHORT, MIDDLE, LONG) if IS_FULL else (SHORT,), ids=lambda texts: texts.chunks)
def test_a_text_that_was_rolled_back_and_forked(name: str, texts: Texts) -> None:
    model = peers.random_model(name, torch.float64)
    reference = peers.reference_of(model)
    expected = expect_gradients(reference, texts)
    for chunk_tokens in texts.chunk_sizes if IS_FULL else texts.chunk_sizes[-1:]:
        model.zero_grad()
        found = go_back(model, texts, chunk_tokens)
        for part, values in expected.items():
            assert torch.allclose(found[part], values, atol=TOLERANCE), (chunk_tokens, part)
        error, where = peers.worst(model, reference)
        assert error <= TOLERANCE, f"chunks of {chunk_tokens}: {error} in {where}"
