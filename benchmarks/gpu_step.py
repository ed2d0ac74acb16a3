"""Measures whole decode steps of a hybrid model of a billion parameters on a GPU.

It compares steps that are captured in a CUDA graph, steps that are not captured, and transformers on the same device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import BambaConfig

from benchmarks.harness import Report, interleave
from benchmarks.workloads import Transformers, make_peer
from hybridmem.memory import HybridMemory
from hybridmem.memory.recorded import RecordedModel
from hybridmem.models import LanguageModel, load_model

CONTEXT = 512

Decode = Callable[[int], None]
"""Decodes so many tokens of every sequence."""


def gpu_step(report: Report, *, quick: bool) -> None:
    """Measure greedy decoding, captured, not captured, and by transformers. Needs a CUDA device."""
    n_sequences, n_tokens, n_rounds = (8, 16, 2) if quick else (64, 64, 5)
    config = make_config(2048, 14, [3, 10])
    contestants = make_contestants(config, n_sequences, CONTEXT, torch.device("cuda"))
    medians = measure(contestants, n_tokens, n_rounds)
    for name, decode in contestants.items():
        report.add(f"greedy decoding of a Bamba of a billion parameters, bfloat16, from {CONTEXT} tokens on", {
            "what": name, "sequences": n_sequences, "ms a step": medians[name] / n_tokens * 1e3,
            "tokens/s": n_sequences * n_tokens / medians[name],
            "times transformers": medians["transformers"] / medians[name], "device busy": _share_busy(decode, n_tokens),
        })  # fmt: skip
    report.notes.append(
        "Asked for a step of 64 sequences: the device busy for 0.95 of the time or more, and 5 times transformers' "
        "speed."
    )


def make_config(n_hidden: int, n_layers: int, attention_at: list[int]) -> BambaConfig:
    return BambaConfig(
        vocab_size=32_000, hidden_size=n_hidden, num_hidden_layers=n_layers, attn_layer_indices=attention_at,
        num_attention_heads=n_hidden // 64, num_key_value_heads=n_hidden // 256, intermediate_size=4 * n_hidden,
        mamba_n_heads=n_hidden // 32, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128, mamba_expand=2,
        mamba_chunk_size=8,  # Transformers needs more memory for prompts with larger chunks: 128 GiB for chunks of 256.
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip


def make_contestants(config: BambaConfig, n_sequences: int, n_context: int, device: torch.device) -> dict[str, Decode]:
    """Return the functions to compare; each has read the same prompts."""
    prompts = torch.randint(config.vocab_size, (n_sequences, n_context), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        peer = make_peer(config).to(torch.bfloat16)
        peer.save_pretrained(folder)
        model = load_model(folder, device=device, dtype="bfloat16", progress=False)
    theirs = Transformers(peer.to(device))
    theirs.prefill(prompts.to(device))

    def decode(n_tokens: int) -> None:
        for _ in range(n_tokens):
            theirs.decode()

    return {
        "ours": _ours(model, model, prompts),
        "ours, recorded": _ours(model, RecordedModel(model), prompts),
        "transformers": decode,
    }


def _ours(model: LanguageModel, stepped: Callable[..., Tensor], prompts: Tensor) -> Decode:
    """Return a function that decodes with this library.

    Tokens stay on the device, so the host plans a step while the step before it runs.
    """
    memory = HybridMemory(model.memory_spec, "16GiB")
    sequences = [memory.open() for _ in prompts]
    logits = memory.run(model, dict(zip(sequences, prompts, strict=True)), max_tokens=8192)
    assert logits is not None, "a model ran"
    tokens = logits.argmax(-1)

    def decode(n_tokens: int) -> None:
        nonlocal tokens
        for _ in range(n_tokens):
            with memory.step(zip(sequences, tokens, strict=True)) as step:
                tokens = stepped(step).argmax(-1)

    return decode


def measure(contestants: dict[str, Decode], n_tokens: int, n_rounds: int) -> dict[str, float]:
    """Return the median seconds of each function.

    A round that is not timed comes first, in which kernels are compiled and steps captured.
    """

    def run(decode: Decode) -> None:
        decode(n_tokens)
        _wait()

    found = interleave({name: partial(run, decode) for name, decode in contestants.items()}, n_rounds)
    return {name: samples.median_ms / 1e3 for name, samples in found.items()}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _share_busy(decode: Decode, n_tokens: int) -> float:
    """Return the share of time in which at least one kernel or copy runs.

    The whole time is that from the start of the first kernel to the end of the last kernel.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        decode(n_tokens)
        _wait()
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return share_covered([(event.time_range.start, event.time_range.end) for event in events])


def share_covered(spans: list[tuple[float, float]]) -> float:
    """Return which share of the time between the first start and the last end is covered by at least one span."""
    spans = sorted(spans)
    covered, reached = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / (reached - spans[0][0])
