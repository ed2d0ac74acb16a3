"""Adapts mlx-lm's prompt caches to the conformance kit, alone and merged as mlx-lm's `BatchGenerator` does."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from hybridmem.memory.testing.adapter import Adapter, Agreement, Handle, InjectedError, Logits, RefusedError
from tests.models.families import CONFIGS


@cache
def _load(name: str) -> tuple[Any, int]:
    """Return a model of mlx-lm on the CPU, from a temporary checkpoint, and the size of its vocabulary."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    from tests.models.checkpoints import write_checkpoint

    mx.set_default_device(mx.cpu)
    config: Any = CONFIGS[name]()
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), config)
        return load_model(path, model_config=_unwritten(config))[0], config.vocab_size


def _unwritten(config: Any) -> dict[str, Any]:
    """Return the config fields that mlx-lm reads and that transformers 5 does not write under these names."""
    rope = getattr(config, "rope_parameters", None) or {}
    given = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return given | ({"intermediate_size": config.num_heads * config.head_dim} if config.model_type == "mamba2" else {})


class _Row:
    """Holds the caches of a sequence, one for each layer, and the number of tokens that were fed."""

    def __init__(self, caches: list[Any], n_tokens: int = 0) -> None:
        self.caches, self.n_tokens = caches, n_tokens


class PromptCacheAdapter(Adapter):
    """Feeds each sequence of a request alone, or all in one batch.

    Args:
        name: the name of a small random model, as in the tests.
        in_batches: merge the caches of a request's sequences, pad the tokens on the right, and extract the caches
            again, as `BatchGenerator` does for prompts with a cached prefix.
    """

    agreement = Agreement(rounding=1e-4)

    def __init__(self, name: str, *, in_batches: bool = False) -> None:
        import mlx.core as mx
        from mlx_lm.models import cache as caches

        self._mx, self._caches, self._in_batches = mx, caches, in_batches
        self._model, self.vocab_size = _load(name)
        self._rows: set[_Row] = set()

    def open(self) -> Handle:
        return self._opened(_Row(self._caches.make_prompt_cache(self._model)))

    def _opened(self, row: _Row) -> _Row:
        self._rows.add(row)
        return row

    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        with _failing(self._model.layers, fail_after):
            if self._in_batches and len(requests) > 1:
                return self._feed_together(requests)
            return [self._feed(row, tokens) for row, tokens in requests.items()]

    def _feed(self, row: _Row, tokens: list[int]) -> Logits:
        logits = self._model(self._mx.array([tokens]), cache=row.caches)
        self._mx.eval(logits, [layer.state for layer in row.caches])
        row.n_tokens += len(tokens)
        return np.array(logits[0])

    def _feed_together(self, requests: Mapping[_Row, list[int]]) -> list[Logits]:
        lengths = [len(tokens) for tokens in requests.values()]
        padding = [max(lengths) - length for length in lengths]
        merged = [layers[0].merge(layers) for layers in zip(*(row.caches for row in requests), strict=True)]
        for layer in merged if any(padding) else []:
            layer.prepare(lengths=lengths, right_padding=padding)
        padded = [tokens + [0] * n for tokens, n in zip(requests.values(), padding, strict=True)]
        logits = self._model(self._mx.array(padded), cache=merged)
        for layer in merged if any(padding) else []:
            layer.finalize()
        self._mx.eval(logits, [layer.state for layer in merged])
        for i, (row, tokens) in enumerate(requests.items()):
            row.caches = [layer.extract(i) for layer in merged]
            row.n_tokens += len(tokens)
        return [np.array(logits[i, :length]) for i, length in enumerate(lengths)]

    def close(self, sequence: Any) -> None:
        self._rows.remove(sequence)

    def rollback(self, sequence: Any, to: int) -> None:
        n_gone = sequence.n_tokens - to
        if not 0 <= n_gone <= sequence.n_tokens:
            raise RefusedError(f"{to} is no position")
        n_trimmed = self._caches.trim_prompt_cache(sequence.caches, n_gone)
        if n_trimmed != n_gone:
            raise RefusedError(f"trim_prompt_cache took back {n_trimmed} tokens of {n_gone}")
        sequence.n_tokens = to

    def fork(self, sequence: Any) -> Handle:
        return self._opened(_Row(copy.deepcopy(sequence.caches), sequence.n_tokens))

    def save(self, sequence: Any, path: Path) -> None:
        file = str(path.with_suffix(".safetensors"))
        self._caches.save_prompt_cache(file, sequence.caches, {"n_tokens": str(sequence.n_tokens)})

    def load(self, path: Path) -> Handle:
        caches, about = self._caches.load_prompt_cache(str(path.with_suffix(".safetensors")), return_metadata=True)
        return self._opened(_Row(caches, int(about["n_tokens"])))

    def usage(self) -> int:
        return sum(layer.nbytes for row in self._rows for layer in row.caches)


@contextmanager
def _failing(layers: list[Any], after: int | None) -> Iterator[None]:
    """Let a model fail after `after` of its layers have run."""
    if after is None or after >= len(layers):
        yield
        return
    layer, whole = layers[after], type(layers[after])

    def fail(*_: object, **__: object) -> Any:
        raise InjectedError

    # Some models return copies of their lists of layers, so the class is replaced instead of the layer.
    layer.__class__ = type(whole.__name__, (whole,), {"__call__": fail})
    try:
        yield
    finally:
        layer.__class__ = whole


SUBJECTS = {name: partial(PromptCacheAdapter, name) for name in ("llama", "jamba", "nemotron-h", "qwen3-next")} | {
    f"{name}, in batches": partial(PromptCacheAdapter, name, in_batches=True)
    for name in ("llama", "jamba", "nemotron-h", "mamba2", "qwen3-next")
}
"""What the table has: attention alone, and recurrent layers."""
