"""Makes and runs the models of 120M parameters that are measured.

This library's model and transformers' model have the same random weights.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DynamicCache,
    JambaConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

from benchmarks.ours import VOCAB
from hybridmem.memory.recurrences import SSD, DeltaRule, Mamba1
from hybridmem.models import LanguageModel, load_model
from hybridmem.models.hf.cache import cache_argument

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 768,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_ATTENTION = {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 2048}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "jamba": lambda: JambaConfig(
        **_COMMON, **_ATTENTION, attn_layer_period=4, attn_layer_offset=2, expert_layer_period=2, expert_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
    ),
    "mamba": lambda: MambaConfig(**_COMMON, num_hidden_layers=24, state_size=16),
    "mamba2": lambda: Mamba2Config(
        **_COMMON, num_hidden_layers=24, state_size=128, num_heads=24, head_dim=64, n_groups=1, expand=2, chunk_size=256
    ),
    "bamba": lambda: BambaConfig(
        **_COMMON, **_ATTENTION, attn_layer_indices=[2, 6, 10], mamba_n_heads=24, mamba_d_head=64, mamba_n_groups=1,
        mamba_d_state=128,
        mamba_expand=2, mamba_chunk_size=256,
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **_COMMON, **_ATTENTION, head_dim=64, linear_num_key_heads=6, linear_num_value_heads=12,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
    "lfm2": lambda: Lfm2Config(
        **_COMMON, **_ATTENTION, layer_types=["conv", "conv", "full_attention", "conv"] * 3, conv_L_cache=3
    ),
}  # fmt: skip
"""Models of about 120 million parameters, hidden size 768: attention at 2, 6 and 10 of 12 layers, or 24 layers without.
"""
MODELS = tuple(CONFIGS)


def make_peer(config: PreTrainedConfig) -> PreTrainedModel:
    """Make the transformers model, with its own random weights."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def save_random(config: PreTrainedConfig, folder: str) -> PreTrainedModel:
    """Write a random checkpoint of this config to `folder`, and return the model that it was written from."""
    peer = make_peer(config)
    peer.save_pretrained(folder)
    return peer


@contextmanager
def both_models(name: str) -> Iterator[tuple[LanguageModel, PreTrainedModel]]:
    """Yield our model, loaded from what transformers saved, and the transformers model."""
    with tempfile.TemporaryDirectory() as folder:
        peer = save_random(CONFIGS[name](), folder)
        yield load_model(folder, progress=False), peer


class Transformers:
    """Prefills and decodes with transformers, in a loop of forward calls with its cache object.

    It decodes greedily, and computes only the last logits.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._cache_name = cache_argument(model)
        self._takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
        self._cache = DynamicCache(config=model.config)
        self._next = torch.empty(0)

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> None:
        self._cache = DynamicCache(config=self.model.config)
        self._length = 0
        self._forward(tokens)

    def decode(self) -> None:
        self._forward(self._next)

    @torch.no_grad()
    def _forward(self, tokens: Tensor) -> None:
        options = {self._cache_name: self._cache, "use_cache": True, "logits_to_keep": 1}
        if self._takes_positions:
            positions = torch.arange(self._length, self._length + tokens.shape[1], device=tokens.device)
            options["position_ids"] = positions[None].expand(len(tokens), -1)
        logits = self.model(tokens, **options).logits[:, -1]
        self._length += tokens.shape[1]
        self._next = logits.max(-1).indices[:, None]


@dataclass
class Mixerless:
    """Runs a step that remembers nothing: only a model's matrix products, norms and gates are left.

    No step of the whole model can be faster.
    """

    token_ids: Tensor
    notes: dict[Any, Any] = field(default_factory=dict)

    @property
    def positions(self) -> Tensor:
        return torch.zeros_like(self.token_ids)

    @property
    def rotary_positions(self) -> Tensor:
        return self.positions

    def embed(self, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        return look_up(self.token_ids)

    def check_model(self, spec: object) -> None: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        return q

    def recur(self, layer: int, rows: Tensor, recurrence: object, *, name: str | None = None) -> Tensor:
        if isinstance(recurrence, Mamba1):
            recurrence.project(rows)
        if isinstance(recurrence, SSD):
            return rows[:, : recurrence.shape.n_inner]
        if isinstance(recurrence, DeltaRule):
            return rows[:, : recurrence.shape.n_heads * recurrence.shape.value_dim]
        return rows

    def select(self, hidden: Tensor) -> Tensor:
        return hidden
