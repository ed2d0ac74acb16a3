"""What a config asks for and a family does not implement is refused, by the name of the value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from models import UnsupportedModelError, load_model
from tests.models.checkpoints import write_checkpoint
from tests.models.families.lfm2 import lfm2_config

REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "conv_L_cache=1": lambda: lfm2_config(conv_L_cache=1),
    "rope_type='dynamic'": lambda: lfm2_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    "layer_types[0]='sliding_attention'": lambda: lfm2_config(layer_types=["sliding_attention", "full_attention", "conv", "conv"]),
}


@pytest.mark.parametrize("value", REFUSED)
def test_it_is_refused_by_its_value(value: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, REFUSED[value]())
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(folder)
    assert value in str(caught.value)
