"""Makes random transformers models for tests of the bridge, with the memory and the cache of each."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.generation import GenerateDecoderOnlyOutput

from hybridmem.memory import HybridMemory
from hybridmem.models import HybridCache, attach
from tests.models.checkpoints import CACHE_NAME, CONFIGS, draw_tokens, randomise_

HYBRIDS = ("jamba", "mamba", "bamba", "qwen3.5")
N_NEW = 10
GREEDY: dict[str, Any] = {
    "max_new_tokens": N_NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
    "return_dict_in_generate": True, "output_logits": True,
}  # fmt: skip


@cache
def hf_model(name: str) -> PreTrainedModel:
    """Return one model for all tests, which leave it as they found it."""
    torch.manual_seed(5)
    config = CONFIGS[name]()
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    model = auto.from_config(config).eval()
    randomise_(model)
    return model


@contextmanager
def attached(name: str, n_rows: int, **options: Any) -> Iterator[tuple[PreTrainedModel, HybridCache]]:
    """Attach a cache of new sequences to the model. At the end, every book balances and all bytes are back."""
    model = hf_model(name)
    with attach(model) as bridge:
        memory = HybridMemory(
            bridge.memory_spec, "2MiB", **({"rollback_window": 16, "page_tokens": 4, "poison": True} | options)
        )
        hybrid = HybridCache(memory, [memory.open() for _ in range(n_rows)])
        yield model, hybrid
        memory.check()
        hybrid.close()
        assert memory.usage().used_bytes == 0


def given(cache: Any) -> dict[str, Any]:
    """Return the argument by which models of this transformers take a cache."""
    return {CACHE_NAME: cache}


def ids(n_tokens: int, seed: int = 0) -> Tensor:
    """Return ids (1, n_tokens)."""
    return torch.tensor([draw_tokens(n_tokens, seed)])


def padded(*lengths: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows of these lengths with padding on their left, and their attention mask."""
    width = max(lengths)
    rows = [torch.nn.functional.pad(ids(n, seed + i), (width - n, 0)) for i, n in enumerate(lengths)]
    return torch.cat(rows), torch.tensor([[0] * (width - n) + [1] * n for n in lengths])


def generate(model: PreTrainedModel, tokens: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    """Generate, with a mask if the class takes one. Without a mask, `generate` takes a token 0 for padding."""
    options = GREEDY | options
    if mask is not None or "attention_mask" in inspect.signature(type(model).forward).parameters:
        options["attention_mask"] = torch.ones_like(tokens) if mask is None else mask
    return model.generate(tokens, **options)


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Tensor, **options: Any) -> Tensor:
    """Return logits (rows, tokens, vocab)."""
    return model(tokens, **options).logits


def stacked(output: GenerateDecoderOnlyOutput) -> Tensor:
    """Return logits (rows, new tokens, vocab)."""
    assert output.logits is not None
    return torch.stack(output.logits, 1)
