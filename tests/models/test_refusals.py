"""What a config asks for and a family does not implement is refused, by the name of the value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from memory import FormatError
from models import UnsupportedModelError, load_model
from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.models.families.lfm2 import lfm2_config
from tests.models.families.qwen3_next import qwen3_next_config

REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "conv_L_cache=1": lambda: lfm2_config(conv_L_cache=1),
    "rope_type='dynamic'": lambda: lfm2_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    "layer_types[0]='sliding_attention'": lambda: lfm2_config(layer_types=["sliding_attention", "full_attention", "conv", "conv"]),
    "layer_types[1]='sliding_attention'": lambda: qwen3_next_config(
        layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2
    ),
    "'relu' as the activation": lambda: qwen3_next_config(hidden_act="relu"),
}


@pytest.mark.parametrize("value", REFUSED)
def test_it_is_refused_by_its_value(value: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, REFUSED[value]())
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(folder)
    assert value in str(caught.value)


def test_value_heads_that_cannot_share_key_heads_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, qwen3_next_config())
    config = json.loads((folder / "config.json").read_text()) | {"linear_num_key_heads": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="6 value heads cannot share 4 key heads"):
        load_model(folder)


BY_OPTION: list[tuple[str, str, Any]] = [
    ("granite-moe-hybrid", "position_embedding_type", "alibi"),
    ("nemotron-h", "tie_word_embeddings", True),
    ("nemotron-h", "attention_bias", True),
    ("nemotron-h", "sliding_window", 4),
    ("nemotron-h", "mamba_proj_bias", True),
    ("nemotron-h", "time_step_limit", [0.1, 0.8]),
    ("zamba2", "use_conv_bias", False),
    ("zamba2", "use_long_context", True),
]


@pytest.mark.parametrize("name, option, value", BY_OPTION)
def test_what_is_not_implemented_is_refused(name: str, option: str, value: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[name]())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {option: value}))
    with pytest.raises(UnsupportedModelError, match=option):
        load_model(folder)
