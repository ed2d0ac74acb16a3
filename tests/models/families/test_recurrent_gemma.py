"""The tests are about what only RecurrentGemma has. The rest is in test_parity.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridmem.models import UnsupportedModelError, load_model
from tests.models.checkpoints import write_checkpoint
from tests.models.families.recurrent_gemma import recurrent_gemma_config


@pytest.mark.parametrize("cap", [0.0, -1.0])
def test_a_cap_that_is_none_is_refused(tmp_path: Path, cap: float) -> None:
    with pytest.raises(UnsupportedModelError, match=f"logits_soft_cap={cap}"):
        load_model(write_checkpoint(tmp_path, recurrent_gemma_config(logits_soft_cap=cap)))
