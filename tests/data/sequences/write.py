"""Writes the saved sequences of this folder: `python tests/data/sequences/write.py FOLDER`.

`family` is `keep` with a checkpoint and a fork. Whoever changes what a file says gives the format another version, a
folder of its own here, and keeps reading the older ones.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridmem.memory import (
    AttentionSpec,
    CrossAttentionSpec,
    HybridMemory,
    MemorySpec,
    RecurrentSpec,
    Rotation,
    Sequence,
    StateTensor,
    Step,
)
from hybridmem.memory.eviction import H2O, Quest
from hybridmem.memory.quantization import Quantized
from hybridmem.memory.recurrences import Fold
from hybridmem.memory.recurrences.linear_attention import LinearAttention, linear_attention_spec

VOCAB = 97
TOKENS = [(7 * i * i + 3 * i) % VOCAB for i in range(45)]
OPTIONS: dict[str, Any] = {"budget": "2MiB", "rollback_window": 6, "page_tokens": 4}

_STATES = RecurrentSpec("average", (5,), (StateTensor("mean", (5,)), StateTensor("count", (1,))), name="states")
_ROTATED = AttentionSpec(2, 1, 8, rotation=Rotation((1.0, 0.1), start=2))
_STORED = replace(_ROTATED, storage=Quantized(4, group=8))
_FADING = linear_attention_spec(2, 3, 4, name="fading")


def _spec(name: str, *layers: tuple[Any, ...]) -> MemorySpec:
    return MemorySpec(layers, VOCAB, model=name)


SUBJECTS: dict[str, tuple[MemorySpec, dict[str, Any]]] = {
    "keep": (
        _spec("keep", (AttentionSpec(2, 1, 4),), (_STATES,), (AttentionSpec(2, 1, 4, window=9),)),
        {"fold": "keep"},
    ),
    "replay": (_spec("replay", (_STATES,), (AttentionSpec(2, 2, 4),)), {"fold": "replay"}),
    "defer": (_spec("defer", (_FADING,), (AttentionSpec(2, 1, 4),)), {"fold": "defer"}),
    "policy": (_spec("policy", (AttentionSpec(2, 1, 4),)).with_policy(H2O(16)), {}),
    "storage": (_spec("storage", (AttentionSpec(2, 1, 8),), (_STATES,)).with_storage(Quantized(4, group=8)), {}),
    "cross": (_spec("cross", (AttentionSpec(2, 1, 4), CrossAttentionSpec(2, 1, 4))), {}),
    "mixed": (
        _spec(
            "mixed",
            (replace(_ROTATED, window=9), replace(_ROTATED, name="heavy", policy=H2O(16, decay=0.5))),
            (replace(_ROTATED, policy=H2O(16)), _STATES, replace(_ROTATED, name="pages", policy=Quest(24))),
            (
                _STORED,
                replace(_STORED, name="groups", policy=Quest(40)),
                replace(_STORED, name="few", policy=H2O(16, every=8)),
            ),
        ),
        {},
    ),
    "latent": (_spec("latent", (AttentionSpec(2, 1, 6, value_dim=4),)), {}),
}
"""Name -> what is remembered, and options of its memory beside `OPTIONS`."""


def _average(states: tuple[Tensor, ...], row: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    mean, count = states
    mean = mean + (row - mean) / (count + 1)
    return (mean, count + 1), mean


def _numbers(step: Step, salt: int, *shape: int) -> Tensor:
    """Return numbers (T, *shape) that follow only from each token and its position."""
    size = torch.Size(shape).numel()
    at = step.token_ids.double()[:, None] * 0.7 + step.positions.double()[:, None] * 0.3
    return torch.sin(at * (1 + torch.arange(size).double() / 3) + salt).float().view(-1, *shape)


def run(step: Step, spec: MemorySpec) -> Tensor:
    """Run a model without weights. Return every layer's outputs side by side, (n_requests, outputs)."""
    outputs = []
    for layer, memories in enumerate(spec.layers):
        for memory in memories:
            if isinstance(memory, RecurrentSpec):
                recurrence = (
                    Fold(_average) if memory.family == "average" else LinearAttention(torch.tensor([-0.1, -0.2]), 4)
                )
                y = step.recur(layer, _numbers(step, layer, *memory.row_shape), recurrence, name=memory.name)
            elif isinstance(memory, CrossAttentionSpec):
                y = step.cross_attend(
                    layer, _numbers(step, layer, memory.n_query_heads, memory.head_dim), name=memory.name
                )
            else:
                q = _numbers(step, layer, memory.n_query_heads, memory.head_dim)
                k, v = (_numbers(step, layer + salt, memory.n_kv_heads, memory.head_dim) for salt in (10, 20))
                y = step.attend(layer, q, k, None if memory.value_dim else v, name=memory.name)
            outputs.append(y.flatten(1))
    return step.select(torch.cat(outputs, 1))


def encoded(spec: MemorySpec) -> Any:
    """Return what an encoder said, for models that have one."""
    if spec.model != "cross":
        return None
    return [tuple(torch.linspace(-1, 1, 5 * 4).view(5, 1, 4) * scale for scale in (1.0, 2.0))]


def make(name: str) -> tuple[HybridMemory, Sequence]:
    """Return a memory of the subject, and a sequence that was fed `TOKENS` in steps of several lengths."""
    spec, options = SUBJECTS[name]
    memory = HybridMemory(spec, **OPTIONS, **options)
    said = encoded(spec)
    sequence = memory.open() if said is None else memory.open(encoder=said)
    for start, end in ((0, 20), (20, 21), (21, 40), (40, 41), (41, 45)):
        feed(memory, sequence, TOKENS[start:end])
    memory.rollback(sequence, to=43)
    return memory, sequence


def feed(memory: HybridMemory, sequence: Sequence, tokens: list[int]) -> Tensor:
    with memory.step({sequence: tokens}) as step:
        return run(step, memory.spec)


def save_family(memory: HybridMemory, sequence: Sequence, path: Path) -> None:
    """Save a sequence, a checkpoint of it, and a fork that has gone on."""
    fork = memory.fork(sequence)
    memory.checkpoint(sequence, holds_tail=True)
    feed(memory, fork, TOKENS[:9])
    memory.save(sequence, path, checkpoints=True, forks={"fork": fork})


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    save_family(*make("keep"), folder / "family.safetensors")
    for subject in SUBJECTS:
        memory, sequence = make(subject)
        memory.save(sequence, folder / f"{subject}.safetensors")
