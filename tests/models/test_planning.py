"""Plans need no weights: they say what a config's model would remember.

`test_parity.py` compares plans with loaded models.
"""

from __future__ import annotations

import pytest
from transformers import JambaConfig

from hybridmem.memory import FormatError, HybridMemory
from hybridmem.models import UnsupportedModelError, plan_memory


def test_a_plan_counts_bytes_of_a_model_that_nobody_could_load_here() -> None:
    """Jamba-1.5-Mini has 52 billion parameters. Its keys and values take 16 KiB for each token in bfloat16."""
    memory = HybridMemory(plan_memory(JambaConfig(), "JambaForCausalLM", dtype="bfloat16"), "100GiB", page_tokens=16)
    assert memory.usage().block_bytes["pages"] == 16 * 16 * 1024
    sequences = [memory.open() for _ in range(10)]
    memory.run(None, dict.fromkeys(sequences, [1] * 5000))
    assert memory.usage().by_kind["pages"] == 10 * 5008 * 16 * 1024


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        plan_memory(JambaConfig(), "GPT2LMHeadModel")
    with pytest.raises(FormatError, match="num_experts_per_tok"):
        plan_memory(JambaConfig(num_experts=4, num_experts_per_tok=9), "JambaForCausalLM")
