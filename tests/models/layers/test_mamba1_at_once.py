"""Mamba-1's recurrence over few rows runs in one call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import JambaConfig, MambaConfig, PreTrainedConfig

from hybridmem.memory import HybridMemory
from hybridmem.models import load_model
from hybridmem.models.layers import mamba_mixers
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mamba_mixers import mamba1_at_once
from tests.models.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(
    Linear(torch.zeros(1, 1)).compiled is None, reason="products of this processor are oneDNN's"
)

_JAMBA = JambaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, attn_layer_period=4, attn_layer_offset=2, num_experts=1, num_experts_per_tok=1,
)  # fmt: skip
_MAMBA = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8)


@pytest.mark.parametrize(("config", "dtype"), [(_JAMBA, "bfloat16"), (_MAMBA, "float32")])
def test_one_call_has_the_bits_of_many(
    config: PreTrainedConfig, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds through prompts, steps and rollbacks of several sequences, with and without the norms of Jamba."""
    write_checkpoint(tmp_path, config)
    n_at_once, histories = 0, list[torch.Tensor]()

    def counted(*products: Linear) -> Callable[..., torch.Tensor | None]:
        advance = mamba1_at_once(*products)
        assert advance is not None

        def count(*arguments: Any) -> torch.Tensor | None:
            nonlocal n_at_once
            y = advance(*arguments)
            n_at_once += y is not None
            return y

        return count

    for make in (counted, lambda *_: None):
        monkeypatch.setattr(mamba_mixers, "mamba1_at_once", make)
        model = load_model(tmp_path, dtype=dtype, progress=False)
        memory = HybridMemory(model.memory_spec, "4MiB", rollback_window=8)
        sequences, draws, found = [memory.open() for _ in range(3)], torch.Generator().manual_seed(0), []
        for i in range(9):
            tokens = {s: torch.randint(0, 64, (1 + i % 2,), generator=draws).tolist() for s in sequences}
            with memory.step(tokens, outputs="all") as step:
                found.append(model(step))
            if i % 4 == 3:
                memory.rollback(sequences[0], to=sequences[0].length - 3)
        histories.append(torch.cat(found))
    assert torch.equal(*histories) and n_at_once
