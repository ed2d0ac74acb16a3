"""Adapts transformers' `DynamicCache` to the conformance kit: one cache for each sequence, by documented calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from hybridmem.memory.testing.adapter import (
    AbsentError,
    Adapter,
    Agreement,
    Handle,
    InjectedError,
    Logits,
    RefusedError,
)
from hybridmem.models.hf.cache import cache_argument
from tests.models.hf_models import hf_model


class _Row:
    """Holds the cache of a sequence, and the number of tokens that were fed."""

    def __init__(self, cache: DynamicCache, n_tokens: int = 0) -> None:
        self.cache, self.n_tokens = cache, n_tokens


class DynamicCacheAdapter(Adapter):
    """Feeds each sequence of a request alone, because a batch of different lengths would need padding.

    Args:
        name: the name of a small random model, as in the tests.
        is_recorded: call `activate_past_recording` first, as assisted generation does before it crops.
        forks_by_rows: fork by copying the cache, doubling the rows of the copy and selecting one of them, instead of by
            copying the cache alone.
    """

    agreement = Agreement(rounding=1e-4)

    def __init__(self, name: str, *, is_recorded: bool = False, forks_by_rows: bool = False) -> None:
        self._model = hf_model(name)
        self._is_recorded, self._forks_by_rows = is_recorded, forks_by_rows
        self.vocab_size = int(self._model.config.vocab_size)

    def open(self) -> Handle:
        cache = DynamicCache(config=self._model.config)
        if self._is_recorded:
            cache.activate_past_recording()
        return _Row(cache)

    @torch.no_grad()
    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        hooks = [] if fail_after is None else _failing(self._model, fail_after)
        try:
            return [self._feed(row, tokens) for row, tokens in requests.items()]
        finally:
            for hook in hooks:
                hook.remove()

    def _feed(self, row: _Row, tokens: list[int]) -> Logits:
        positions = torch.arange(row.n_tokens, row.n_tokens + len(tokens))[None]
        options: dict[str, Any] = {cache_argument(self._model): row.cache}
        if "position_ids" in inspect.signature(type(self._model).forward).parameters:
            options["position_ids"] = positions
        logits = self._model(torch.tensor([tokens]), use_cache=True, **options).logits[0]
        row.n_tokens += len(tokens)
        return np.asarray(logits.float().numpy())

    def close(self, sequence: Any) -> None:
        sequence.cache = None

    def rollback(self, sequence: Any, to: int) -> None:
        try:
            sequence.cache.crop(to - sequence.n_tokens)
        except (RuntimeError, NotImplementedError) as error:
            raise RefusedError(f"crop: {error}") from error
        sequence.n_tokens = to

    def fork(self, sequence: Any) -> Handle:
        twin = copy.deepcopy(sequence.cache)
        if self._forks_by_rows:
            twin.batch_repeat_interleave(2)
            twin.batch_select_indices(torch.tensor([1]))
        return _Row(twin, sequence.n_tokens)


def _failing(model: PreTrainedModel, after: int) -> list[Any]:
    """Let the model fail after `after` of its layers have run; return the hooks, which the caller must remove."""
    layers = next((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), None)
    if layers is None:
        raise AbsentError("no layers were found that could fail")

    def fail(*_: object) -> None:
        raise InjectedError

    return [layers[after].register_forward_pre_hook(fail)] if after < len(layers) else []


SUBJECTS = {
    "llama": partial(DynamicCacheAdapter, "llama", forks_by_rows=True),
    "jamba": partial(DynamicCacheAdapter, "jamba"),
    "jamba, past recorded": partial(DynamicCacheAdapter, "jamba", is_recorded=True),
    "jamba, forks by rows": partial(DynamicCacheAdapter, "jamba", forks_by_rows=True),
    "falcon-h1": partial(DynamicCacheAdapter, "falcon-h1", forks_by_rows=True),
    "falcon-h1, past recorded": partial(DynamicCacheAdapter, "falcon-h1", is_recorded=True),
    "mamba2": partial(DynamicCacheAdapter, "mamba2"),
    "qwen3.5": partial(DynamicCacheAdapter, "qwen3.5", is_recorded=True),
}
"""What the table has: attention alone, and hybrids."""
