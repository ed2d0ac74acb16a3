"""Makes the cases for which `python -m benchmarks tune` chooses.

They are layers of Jamba, Granite 4 and Bamba, Qwen3.5 and DeepSeek, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_attention import CONTEXT, HEADS, N_BYTES, PAGE_TOKENS, Heads, make_layers
from benchmarks.gpu_states import LAYERS, N_DRAFTS, Layer, Work
from benchmarks.gpu_tails import make_mamba1, make_rwkv7
from hybridmem.memory.blocks.staging import place
from hybridmem.memory.kernels import PageChoice, StateSlots, cuda
from hybridmem.memory.quantization import Quantized

Run = Callable[[], tuple[Tensor, ...]]
"""Computes what is timed, and returns what is compared."""
DENSE, WIDE, LATENT = HEADS
"""Attention of Jamba, Granite 4 and Bamba; of Qwen3.5; of DeepSeek."""
SSD, DELTA = LAYERS
PROMPT_TOKENS, PROMPT_BYTES = 2048, 64 << 20
"""Tokens of a prompt, and bytes of its keys and values: few layers do, as prompts compute more than they read."""
_MOST_LAYERS = 512


@dataclass(frozen=True)
class Case:
    """Describes a choice to make, for sizes that are the same in each of its runs.

    A run is made when it is needed, because it fills gigabytes.
    """

    name: str
    kernel: str
    runs: tuple[Callable[[], Run], ...]


def make_cases() -> list[Case]:
    """Return all cases, grouped by kernel."""
    return [*_attention(), *_matrix_states(), *_channels()]


def _attention() -> list[Case]:
    cases = [
        Case("decode, 128", "attend", (_attend(DENSE, 1), _attend(DENSE, 128))),
        Case(f"{N_DRAFTS} drafts, 128", "attend", (_attend(DENSE, 1, 1 + N_DRAFTS), _attend(DENSE, 128, 1 + N_DRAFTS))),
        Case("prompt, 128", "attend", (_prompt(DENSE),)),
        Case("decode, 256", "attend", (_attend(WIDE, 1), _attend(WIDE, 128))),
        Case("prompt, 256", "attend", (_prompt(WIDE),)),
        Case("decode, latent", "attend", (_attend(LATENT, 1), _attend(LATENT, 128))),
    ]
    for heads in (DENSE, WIDE):
        for bits in (8, 4):
            run = partial(_attend, heads, storage=Quantized(bits))
            cases.append(Case(f"decode, {heads.head_dim}, {bits} bits", "attend", (run(1), run(64))))
    for heads in HEADS:
        runs = _attend(heads, 1), _attend(heads, 16), _attend(heads, 128), _attend(heads, 1, context=8 * CONTEXT)
        cases.append(Case(f"splits, {heads.head_dim}", "split", runs))
    pages = partial(_choose_pages, DENSE)
    return [*cases, Case("pages, 128", "score_pages", (partial(pages, 1), partial(pages, 64)))]


def _attend(heads: Heads, n_sequences: int, n_new: int = 1, context: int = CONTEXT, **options: Any) -> Any:
    return partial(_attention_run, heads, n_sequences, n_new, context=context, **options)


def _prompt(heads: Heads) -> Any:
    return partial(_attention_run, heads, 1, PROMPT_TOKENS, context=PROMPT_TOKENS, n_bytes=PROMPT_BYTES)


def _attention_run(heads: Heads, n_sequences: int, n_new: int, **options: Any) -> Run:
    run, _ = make_layers(heads, n_sequences, n_new, **options)
    return lambda: (run(),)


def _choose_pages(heads: Heads, n_sequences: int) -> Run:
    """Make a run that chooses an eighth of the pages.

    Queries and bounds are whole numbers, so rounding cannot change the choice.
    """
    n_pages, size = CONTEXT // PAGE_TOKENS, heads.n_kv_heads * heads.head_dim
    bounds = torch.randint(-2, 3, (n_sequences * n_pages * 2 * size,), device="cuda").bfloat16()
    cu_pages = np.arange(n_sequences + 1) * n_pages
    pages = torch.randperm(n_sequences * n_pages, device="cuda") * 2 * size
    choice = PageChoice(pages, cu_pages, 1, np.ones(n_sequences, np.int64), np.arange(n_sequences + 1) * (n_pages // 8))
    q = torch.randint(-2, 3, (n_sequences, heads.n_heads, heads.head_dim), device="cuda").bfloat16()
    return lambda: (cuda.choose_pages(q, bounds, bounds[size:], choice, heads.n_kv_heads),)


def _matrix_states() -> list[Case]:
    reads = {f"decode behind a tail, {layer.name}": layer for layer in LAYERS}
    cases = [
        Case(name, "read_states", tuple(partial(_read, layer, n) for n in (1, 128))) for name, layer in reads.items()
    ]
    for layer in LAYERS:
        cases.append(Case(f"decode, {layer.name}", "scan_tokens", tuple(partial(_scan, layer, n, 1) for n in (1, 128))))
        cases.append(
            Case(
                f"prompts, {layer.name}", "scan_chunks", tuple(partial(_scan, layer, n, PROMPT_TOKENS) for n in (1, 8))
            )
        )
    return cases


def _read(layer: Layer, n_sequences: int) -> Run:
    work = Work(layer, torch.bfloat16, n_sequences, 1)
    return lambda: (work.read(),)


def _scan(layer: Layer, n_sequences: int, n_new: int) -> Run:
    """Make a run that reads states and writes the new states elsewhere, so that each call gives the same results."""
    work = Work(layer, torch.bfloat16, n_sequences, n_new, n_layers=None if n_new == 1 else 4)
    n_layers = min(work.n_layers // 2, _MOST_LAYERS)

    begin = (2 * n_layers - 1) * n_sequences * layer.state_elements

    def run() -> tuple[Tensor, ...]:
        for sources, targets in zip(work.offsets[:n_layers], work.offsets[n_layers : 2 * n_layers], strict=True):
            y = work.scan(StateSlots(work.cu_rows, work.flat, sources, targets, work.shape, 0.0))
        return y, work.flat[begin : begin + layer.state_elements]

    return run


def _channels() -> list[Case]:
    return [
        Case(
            "prompts, RWKV-7, 40 heads of 64",
            "scan_columns",
            tuple(partial(_by_column, n, PROMPT_TOKENS) for n in (1, 8)),
        ),
        Case("decode, Mamba-1, 8192 channels", "selective_scan", (partial(_selective, 1), partial(_selective, 128))),
        Case(
            "decode and prompts, 8192 channels", "causal_conv", (partial(_convolve, 128, 1), partial(_convolve, 8, 256))
        ),
        Case("decode, RG-LRU, 2560 channels", "vectors", (partial(_linear, 1), partial(_linear, 128))),
    ]


def _slots(
    shape: tuple[int, ...], n_sequences: int, n_new: int, dtype: torch.dtype = torch.float32
) -> list[StateSlots]:
    """Return the state slots of many layers. Each layer reads its states at one place and writes them to another."""
    size = int(np.prod(shape))
    n_layers = min(_MOST_LAYERS, max(1, N_BYTES // (2 * dtype.itemsize * n_sequences * size)))
    flat = torch.randn(2 * n_layers * n_sequences * size, device="cuda").to(dtype)
    offsets = torch.arange(0, len(flat), size, device="cuda").view(n_layers, 2, n_sequences)
    cu_rows = place(np.arange(n_sequences + 1) * n_new, flat.device)
    return [StateSlots(cu_rows, flat, own[0], own[1], shape, 0.0) for own in offsets]


def _through(layers: list[StateSlots], function: Any, *inputs: Tensor, **options: Any) -> Run:
    """Make a run that calls `function` with each layer's states, and returns the last layer's output and state."""
    last, size = layers[-1], int(np.prod(layers[-1].shape))

    def run() -> tuple[Tensor, ...]:
        for slots in layers:
            y = function(*inputs, slots, **options)
        return y, last.flat[-size:]

    return run


def _selective(n_sequences: int, n_channels: int = 8192, n_states: int = 16) -> Run:
    return _through(_slots((n_states, n_channels), n_sequences, 1), make_mamba1(n_channels, n_states, n_sequences))


def _by_column(n_sequences: int, n_new: int, n_heads: int = 40, head_dim: int = 64) -> Run:
    layers = _slots((n_heads, head_dim, head_dim), n_sequences, n_new)[:4]
    return _through(layers, make_rwkv7(n_heads, head_dim, n_sequences * n_new))


def _convolve(n_sequences: int, n_new: int, n_channels: int = 8192, n_taps: int = 4) -> Run:
    rows = torch.randn(n_sequences * n_new, n_channels, device="cuda").bfloat16()
    weight = torch.randn(n_taps, n_channels, device="cuda").bfloat16()
    bias = torch.randn(n_channels, device="cuda").bfloat16()
    layers = _slots((n_taps - 1, n_channels), n_sequences, n_new, torch.bfloat16)
    return _through(layers[: 64 if n_new > 1 else None], cuda.causal_conv, rows, weight, bias)


def _linear(n_sequences: int, n_channels: int = 2560) -> Run:
    x = torch.randn(n_sequences, n_channels, device="cuda").bfloat16()
    decay = torch.rand(n_sequences, n_channels, device="cuda").bfloat16()
    return _through(_slots((n_channels,), n_sequences, 1), cuda.linear_scan, x, decay)
