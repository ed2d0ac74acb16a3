"""Measures `generate` of transformers on its own cache and attached to a memory: the same model, in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.harness import Report, Samples
from benchmarks.workloads import CONFIGS, draw, make_peer
from memory import HybridMemory
from models import HybridCache, attach

MODELS = ("jamba", "bamba")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_N_PROMPT, _N_NEW = 64, 17


def bridge(*, quick: bool, models: Sequence[str] = MODELS) -> Report:
    """Generate 17 tokens behind prompts of 64, of 1 and of 8 rows, plain and attached."""
    report = Report("bridge")
    for name in models:
        for label, dtype in _DTYPES.items():
            model = make_peer(CONFIGS[name]()).to(dtype)
            for n_rows in (1, 8):
                found = _in_turns(model, draw(n_rows, _N_PROMPT), n_rounds=2 if quick else 3)
                plain, attached = (Samples(seconds) for seconds in found)
                report.add(f"generate, {_N_PROMPT} + {_N_NEW} tokens, s", {
                    "model": name, "dtype": label, "rows": n_rows, "plain": plain.median_ms / 1e3,
                    "spread": plain.spread, "attached": attached.median_ms / 1e3, "its spread": attached.spread,
                    "plain / attached": plain.median_ms / attached.median_ms,
                })  # fmt: skip
    report.notes.append(
        "Random models of 120M parameters. Both sides run the same modules with the same weights; plain, transformers "
        "has its own cache and its own recurrent layers, attached, the memory does what they do. The cache is new in "
        "each round, the memory is kept."
    )
    return report


def _in_turns(model: PreTrainedModel, tokens: Tensor, *, n_rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each call, plain and attached, after one of each that is not timed."""
    plain, attached = list[float](), list[float]()
    memory: HybridMemory | None = None
    for i in range(n_rounds + 1):
        seconds = _generate(model, tokens, None)
        with attach(model) as handle:
            memory = memory or HybridMemory(handle.memory_spec, "2GiB", rollback_window=32)
            cache = HybridCache(memory, [memory.open() for _ in tokens])
            own = _generate(model, tokens, cache)
            cache.close()
        if i:
            plain.append(seconds)
            attached.append(own)
    return plain, attached


def _generate(model: PreTrainedModel, tokens: Tensor, cache: HybridCache | None) -> float:
    options = {} if cache is None else {"past_key_values": cache}
    started = time.perf_counter()
    model.generate(
        tokens, attention_mask=torch.ones_like(tokens), min_new_tokens=_N_NEW, max_new_tokens=_N_NEW, do_sample=False,
        **options,
    )  # fmt: skip
    return time.perf_counter() - started
