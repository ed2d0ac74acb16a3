"""A config that asks for something that a family does not implement is refused, with the name of the value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from hybridmem.memory import FormatError
from hybridmem.models import UnsupportedModelError, load_model
from tests.extent import few_cases
from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.models.families.deepseek import deepseek_v3_config
from tests.models.families.lfm2 import lfm2_config
from tests.models.families.qwen3_next import qwen3_next_config

REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "conv_L_cache=1": lambda: lfm2_config(conv_L_cache=1),
    "rope_type='dynamic'": lambda: lfm2_config(
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
    "layer_types[0]='sliding_attention'": lambda: lfm2_config(
        layer_types=["sliding_attention", "full_attention", "conv", "conv"]
    ),
    "layer_types[1]='sliding_attention'": lambda: qwen3_next_config(
        layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2
    ),
    "'relu' as the activation": lambda: qwen3_next_config(hidden_act="relu"),
    "partial_rotary_factor=0.5": lambda: deepseek_v3_config(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
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


@pytest.mark.parametrize(
    "name, options, named",
    [
        ("deepseek-v3", {"n_group": 3, "topk_group": 2}, r"4 of 4 experts in 3 groups \(n_group\)"),
        ("deepseek-v3", {"n_group": 4, "topk_group": 4}, "each judged by its best 2"),
        ("deepseek-v3", {"n_group": 2, "topk_group": 1}, r"cannot be chosen from 1 of these \(topk_group\)"),
        ("deepseek-v3", {"n_group": 2, "topk_group": 3}, "cannot be chosen from 3 of these"),
        ("deepseek-v2-three-of-eight-experts-in-groups", {"n_group": 8}, "3 of 8 experts in 8 groups"),
        ("deepseek-v2", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, but there are 4 experts"),
    ],
)
def test_experts_that_cannot_be_chosen_are_named(
    name: str, options: dict[str, int], named: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[name]())
    config = json.loads((folder / "config.json").read_text()) | options
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=named):
        load_model(folder)


def test_other_decays_than_the_computed_ones_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["minimax"]())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.slope_rate"] *= 1.1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"layers\.2\.self_attn\.slope_rate .* num_attention_heads"):
        load_model(folder)


BY_OPTION: list[tuple[str, str, Any]] = [
    ("bailing-hybrid", "num_key_value_heads", 2),
    ("bailing-hybrid", "kda_lower_bound", float("nan")),
    ("deepseek-v2", "norm_topk_prob", True),
    ("deepseek-v2", "scoring_func", "sigmoid"),
    ("deepseek-v2", "topk_method", "best"),
    ("deepseek-v2", "moe_layer_freq", 2),
    ("deepseek-v2", "num_key_value_heads", 2),
    ("deepseek-v2", "n_shared_experts", 0),
    ("deepseek-v3", "scoring_func", "softmax"),
    ("deepseek-v3", "topk_method", "greedy"),
    ("deepseek-v3", "quantization_config", {"quant_method": "bitsandbytes"}),
    ("granite-moe-hybrid", "position_embedding_type", "alibi"),
    ("kimi-linear", "num_key_value_heads", 2),
    ("kimi-linear", "num_shared_experts", 0),
    ("kimi-linear", "tie_word_embeddings", True),
    ("nemotron-h", "tie_word_embeddings", True),
    ("nemotron-h", "attention_bias", True),
    ("nemotron-h", "sliding_window", 4),
    ("nemotron-h", "mamba_proj_bias", True),
    ("nemotron-h", "time_step_limit", [0.1, 0.8]),
    ("zamba", "attention_hidden_size", 24),
    ("zamba2", "use_conv_bias", False),
    ("zamba2", "use_long_context", True),
]


@few_cases
@pytest.mark.parametrize("name, option, value", BY_OPTION)
def test_what_is_not_implemented_is_refused(name: str, option: str, value: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[name]())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {option: value}))
    with pytest.raises(UnsupportedModelError, match=option):
        load_model(folder)
