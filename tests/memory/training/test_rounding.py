"""Gradients in float32 differ from those in float64 by rounding alone.

`python -m benchmarks gradient-rounding` has the errors of all architectures, beside those of transformers itself.
"""

from __future__ import annotations

import pytest

from tests.memory.training import peers
from tests.memory.training.texts import SHORT, expect_gradients, go_back
from tests.subjects import IS_FULL

NAMES = ("bamba", "deepseek-v3.2", "gemma3", "minimax", "qwen3-next", "recurrent-gemma", "rwkv", "zaya")
TOLERANCE = 1e-5
"""Of the largest number of each tensor's gradient."""


def errors(name: str) -> tuple[float, float]:
    """Return the error of gradients in float32 through the memory, and that of transformers over whole texts."""
    model = peers.random_model(name)
    exact, plain = peers.reference_of(peers.in_float64(model, name)), peers.reference_of(model)
    for reference in (exact, plain):
        expect_gradients(reference, SHORT)
    go_back(model, SHORT, chunk_tokens=7)
    return peers.worst(model, exact)[0], peers.worst(plain, exact)[0]


@pytest.mark.parametrize("name", NAMES if IS_FULL else NAMES[:3])
def test_float32(name: str) -> None:
    assert 0 < errors(name)[0] <= TOLERANCE


def test_where_transformers_itself_rounds_more() -> None:
    """The norms of Jamba's small rows lose digits in any float32."""
    own, theirs = errors("jamba")
    assert TOLERANCE < own < theirs
