"""After tokens of a model were dropped, its keys are as if computed at their new positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridmem.memory import AttentionSpec, HybridMemory, Sequence
from hybridmem.models import LanguageModel, load_model
from tests.extent import few_cases
from tests.inside import stored_keys
from tests.models.checkpoints import CONFIGS, draw_tokens, write_checkpoint


def fed(model: LanguageModel, tokens: list[int]) -> tuple[HybridMemory, Sequence]:
    memory = HybridMemory(model.memory_spec, "2MiB", page_tokens=4, poison=True)
    sequence = memory.open()
    memory.run(model, {sequence: tokens})
    return memory, sequence


@few_cases
@pytest.mark.parametrize(
    "name",
    ["llama", "llama-3-rope", "qwen3", "bamba", "qwen3-next-no-experts", "zamba2", "lfm2", "jamba", "deepseek-v3"],
)
def test_keys_of_the_first_layer_are_those_of_a_sequence_that_never_saw_the_dropped_tokens(
    name: str, tmp_path: Path
) -> None:
    """No layer comes before it, so its keys depend only on the token and the position.

    Later keys depend on what the model saw.
    """
    model = load_model(write_checkpoint(tmp_path, CONFIGS[name]()))
    tokens = draw_tokens(60)
    memory, sequence = fed(model, tokens)
    before = stored_keys(memory, sequence, 0)
    memory.drop(sequence, 7, 29, approximate=True)
    memory.check()
    actual = stored_keys(memory, sequence, 0)
    assert torch.equal(actual[:7], before[:7])
    if isinstance(model.memory_spec.layers[0][0], AttentionSpec):
        expected = stored_keys(*fed(model, tokens[:7] + tokens[29:]), 0)
        assert (actual - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    with memory.step({sequence: tokens[:5]}) as step:
        assert torch.isfinite(model(step)).all()


def test_a_later_layer_still_carries_a_trace(tmp_path: Path) -> None:
    """The docstring of `drop` says so of deeper layers. Otherwise no user would have to ask for the approximation."""
    model = load_model(write_checkpoint(tmp_path, CONFIGS["llama"]()))
    tokens = draw_tokens(60)
    memory, sequence = fed(model, tokens)
    memory.drop(sequence, 7, 29)
    expected = stored_keys(*fed(model, tokens[:7] + tokens[29:]), 1)
    assert (stored_keys(memory, sequence, 1) - expected).abs().max() > 1e-2
