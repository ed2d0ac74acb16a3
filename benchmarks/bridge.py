"""Measures transformers' `generate` with its own cache and with a memory of ours: the same model, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.harness import Report, Samples
from benchmarks.ours import draw
from benchmarks.workloads import CONFIGS, make_peer
from hybridmem.memory import HybridMemory
from hybridmem.models import HybridCache, attach
from hybridmem.models.hf.cache import cache_argument

MODELS = ("jamba", "bamba", "qwen3_5")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_N_PROMPT, _N_NEW, _N_BEAMS = 64, 17, 4

Clock = Callable[[], float]


def bridge(*, quick: bool, models: Sequence[str] = MODELS, by_cpu_time: bool = False) -> Report:
    """Generate 17 tokens after 1 or 8 prompts of 64 tokens, greedily or with 4 beams, with either cache.

    Args:
        by_cpu_time: measure the processor time of this process instead of the time of the clock, because on a busy
            machine only the former can be compared. One thread is used then, because the time of waiting threads would
            count too.
    """
    report, clock = Report("bridge"), time.process_time if by_cpu_time else time.perf_counter
    if by_cpu_time:
        torch.set_num_threads(1)
        report.notes.append("Seconds are CPU time of one thread: the machine had other work.")
    for name in models:
        for label, dtype in _DTYPES.items():
            model = make_peer(CONFIGS[name]()).to(dtype)
            for n_rows in (1, 8):
                for n_beams in (1, _N_BEAMS):
                    tokens = draw(n_rows, _N_PROMPT)
                    found = _in_turns(model, tokens, clock, n_beams, n_rounds=2 if quick else 3)
                    plain, attached = (Samples(seconds) for seconds in found)
                    report.add(f"generate, {_N_PROMPT} + {_N_NEW} tokens, ms", {
                        "model": name, "dtype": label, "rows": n_rows, "beams": n_beams, "plain": plain.median_ms,
                        "spread": plain.spread, "attached": attached.median_ms, "its spread": attached.spread,
                        "plain / attached": plain.median_ms / attached.median_ms,
                    })  # fmt: skip
    report.notes.append(
        "Random models of 120M parameters. Both sides run the same modules with the same weights; plain, transformers "
        "has its own cache and its own recurrent layers, attached, the memory does what they do. The cache is new in "
        "each round, the memory is kept."
    )
    return report


def _in_turns(
    model: PreTrainedModel, tokens: Tensor, clock: Clock, n_beams: int, *, n_rounds: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of each call, with transformers' cache and with a memory, after one untimed call of each."""
    plain, attached = list[float](), list[float]()
    memory: HybridMemory | None = None
    for i in range(n_rounds + 1):
        seconds = _generate(model, tokens, None, clock, n_beams)
        with attach(model) as handle:
            memory = memory or HybridMemory(handle.memory_spec, "2GiB", rollback_window=32)
            cache = HybridCache(memory, [memory.open() for _ in range(n_beams * len(tokens))])
            own = _generate(model, tokens, cache, clock, n_beams)
            cache.close()
        if i:
            plain.append(seconds)
            attached.append(own)
    return plain, attached


def _generate(
    model: PreTrainedModel, tokens: Tensor, cache: HybridCache | None, clock: Clock, n_beams: int
) -> float:  # fmt: skip
    options = {} if cache is None else {cache_argument(model): cache}
    started = clock()
    model.generate(
        tokens, attention_mask=torch.ones_like(tokens), min_new_tokens=_N_NEW, max_new_tokens=_N_NEW, do_sample=False,
        num_beams=n_beams, **options,
    )  # fmt: skip
    return clock() - started
