"""The tests are about what only RWKV has: halved layers, old layouts, refused options.

The rest is in test_parity.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridmem.memory import FormatError, HybridMemory
from hybridmem.models import LanguageModel, UnsupportedModelError, load_model
from hybridmem.models.families.rwkv7 import RWKV7Config
from tests.models.checkpoints import draw_tokens, write_checkpoint
from tests.models.families.rwkv import rwkv_config
from tests.models.families.rwkv7 import rwkv7_config
from tests.tolerances import assert_split_close

TOKENS = draw_tokens(20)


def run(model: LanguageModel) -> Tensor:
    memory = HybridMemory(model.memory_spec, "2MiB", poison=True)
    with memory.step({memory.open(): TOKENS}, outputs="all") as step:
        return model(step)


def test_halved_layers_are_the_same_model(tmp_path: Path) -> None:
    """Only the epsilon of its norms differs, which is small beside anything but a halved stream."""
    folder = write_checkpoint(tmp_path, rwkv_config(num_hidden_layers=4, rescale_every=2, layer_norm_epsilon=1e-9))
    halved = run(load_model(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rescale_every": 0}))
    assert_split_close(run(load_model(folder)), halved)


def test_rwkv7_mixtures_may_be_one_tensor(tmp_path: Path) -> None:
    """The first checkpoints of flash-linear-attention have one tensor."""
    folder = write_checkpoint(tmp_path, rwkv7_config())
    expected = run(load_model(folder))
    tensors = load_file(folder / "model.safetensors")
    for i in range(3):
        prefix = f"model.layers.{i}.attn.x_"
        tensors[prefix + "x"] = torch.cat([tensors.pop(prefix + name)[0] for name in "rwkvag"])
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(run(load_model(folder)), expected)


@pytest.mark.parametrize(
    "options",
    [{"hidden_act": "relu"}, {"attn": {"layers": [1], "num_heads": 3}}, {"value_dim": 48}, {"value_dim": [24, 24, 48]}],
    ids=str,
)
def test_rwkv7_options_that_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    folder = write_checkpoint(tmp_path, rwkv7_config())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | options))
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(folder)
    assert f"{name}={value!r}" in str(caught.value)


def test_rwkv7_heads_must_share_the_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, rwkv7_config())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 7}))
    with pytest.raises(FormatError, match="head_dim=7"):
        load_model(folder)


def test_rwkv7_sizes_that_are_not_given_grow_with_the_model() -> None:
    """flash-linear-attention chooses them so, not always as in the paper's table."""
    for n_model, ranks in ((768, (64, 128, 64, 32)), (1024, (64, 160, 64, 64)), (2048, (128, 224, 128, 64))):
        config = RWKV7Config(hidden_size=n_model)
        assert (
            config.decay_low_rank_dim,
            config.gate_low_rank_dim,
            config.a_low_rank_dim,
            config.v_low_rank_dim,
        ) == ranks
        assert config.num_heads == n_model // 64 and config.intermediate_size == 4 * n_model
