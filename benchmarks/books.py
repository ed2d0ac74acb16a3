"""Measures what bookkeeping costs, on dry memories, and which bytes a sequence holds.

A dry memory touches no tensor, so nothing but bookkeeping is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.harness import Report
from benchmarks.ours import Ours, draw
from benchmarks.workloads import MODELS, both_models
from hybridmem.memory import AttentionSpec, HybridMemory, MemorySpec, Sequence
from hybridmem.memory.recurrences import mamba1_spec
from hybridmem.models import weight_bytes

WINDOW = 32
PEERS = (
    "Peers, measured elsewhere on two cores, not in this run: vLLM 0.33's KVCacheManager (1 full and 3 Mamba groups, "
    "64 sequences) takes 28-50 µs a sequence and decode step and 36-236 µs to free one; SGLang's MambaSlotAllocator "
    "9-10 µs to allocate and free. Neither is installed by this project."
)


def make_memory(n_layers: int) -> HybridMemory:
    """Return a dry memory of a model with attention in a quarter of its layers and Mamba-1 in the others."""
    attention, mamba = AttentionSpec(12, 4, 64), mamba1_spec(1536, 16, 4)
    layers = tuple((attention if i % 4 == 2 else mamba,) for i in range(n_layers))
    spec = MemorySpec(layers, 32000, device=torch.device("meta"))
    return HybridMemory(spec, "640GiB", rollback_window=WINDOW, fold="keep")


def bookkeeping(*, quick: bool) -> Report:
    """Measure microseconds per sequence of a decode step, and of open and close.

    A decode step is made, entered and committed. Sequences are closed empty and after a prompt.
    """
    report = Report("bookkeeping")
    report.notes.append(PEERS)
    for n_layers in (12,) if quick else (12, 48):
        for n in (1, 8, 64, 256):
            memory = make_memory(n_layers)
            sequences = [memory.open() for _ in range(n)]
            memory.run(None, {sequence: [1] * (100 + i) for i, sequence in enumerate(sequences)})
            requests = dict.fromkeys(sequences, 5)

            def decode(memory: HybridMemory = memory, requests: dict[Sequence, int] = requests) -> None:
                with memory.step(requests):
                    pass

            def open_close(memory: HybridMemory = memory, n: int = n) -> None:
                for sequence in [memory.open() for _ in range(n)]:
                    memory.close(sequence)

            n_repeats = 60 if quick else 400
            report.add("bookkeeping, µs a sequence", {
                "layers": n_layers, "sequences": n, "decode step": _median_us(decode, n_repeats) / n,
                "asked": 5.0 if n >= 64 else "-", "open + close": _median_us(open_close, n_repeats) / n,
                "asked ": 10.0 if n >= 64 else "-", "close after a prompt": _close_us(memory, n, n_repeats // 10) / n,
            })  # fmt: skip
    return report


def _median_us(run: Callable[[], object], n_repeats: int) -> float:
    samples = []
    for _ in range(n_repeats):
        started = time.perf_counter_ns()
        run()
        samples.append((time.perf_counter_ns() - started) / 1000)
    return median(samples)


def _close_us(memory: HybridMemory, n: int, n_repeats: int) -> float:
    samples = []
    for _ in range(n_repeats):
        sequences = [memory.open() for _ in range(n)]
        memory.run(None, dict.fromkeys(sequences, [1] * 40))
        started = time.perf_counter_ns()
        for sequence in sequences:
            memory.close(sequence)
        samples.append((time.perf_counter_ns() - started) / 1000)
    return median(samples)


def rollback(*, quick: bool) -> Report:
    """Measure rollback by k tokens, fork, abort, checkpoint and reorder, against k, layers and context.

    Bookkeeping is timed alone first, then beside a decode step.
    """
    report = Report("rollback")
    for n_layers in (4, 12, 48):
        for n_context in (1024, 16384):
            memory = make_memory(n_layers)
            base = memory.open()
            memory.run(None, {base: [1] * n_context}, max_tokens=4096)
            for k in (1, 8, WINDOW):
                figures = _going_back_us(memory, base, k, 100 if quick else 1000)
                report.add("going back, µs", {"layers": n_layers, "context": n_context, "k": k, **figures})
    with both_models("jamba") as (model, _):
        for n_context in (1024,) if quick else (1024, 16384):
            ours = Ours(model, 1)
            ours.fill(draw(1, n_context))
            figures = _going_back_us(ours.memory, ours.sequences[0], 8, 5 if quick else 20, model)
            steps_us = _median_us(ours.decode, 5 if quick else 20)
            report.add(
                "beside a decode step of Jamba 120M, µs", {"context": n_context, "decode step": steps_us, **figures}
            )
    return report


def _going_back_us(
    memory: HybridMemory, base: Sequence, k: int, n_repeats: int, model: Callable[..., object] | None = None
) -> dict[str, float]:
    """Return the median time of each operation in microseconds, by the operation's name.

    Before each measurement, a fresh fork of `base` is fed k tokens.
    """
    made: list[Sequence] = []

    def prepare() -> Sequence:
        for sequence in made:
            memory.close(sequence)
        made[:] = [memory.fork(base)]
        with memory.step({made[0]: [1] * k}) as step:
            if model is not None:
                model(step)
        return made[0]

    def timed(operation: Callable[[Sequence], object]) -> float:
        samples = []
        for _ in range(n_repeats):
            sequence = prepare()
            started = time.perf_counter_ns()
            operation(sequence)
            samples.append((time.perf_counter_ns() - started) / 1000)
        return median(samples)

    def abort_us() -> float:
        """Return the microseconds from an exception inside of a step until it has left the step."""
        samples = []
        for _ in range(n_repeats):
            step = memory.step({prepare(): [1]})
            step.__enter__()
            started = time.perf_counter_ns()
            step.__exit__(KeyError, KeyError(), None)
            samples.append((time.perf_counter_ns() - started) / 1000)
        return median(samples)

    length = base.length
    figures = {
        "rollback": timed(lambda s: memory.rollback(s, to=length)),
        "fork": timed(lambda s: made.append(memory.fork(s))),
        "checkpoint": timed(lambda s: made.append(memory.checkpoint(s))),
        "reorder": timed(lambda s: memory.reorder({s: base})),
        "abort": abort_us(),
    }
    for sequence in made:
        memory.close(sequence)
    return figures


def memory_bytes(*, quick: bool) -> Report:
    """Measure the bytes that a sequence holds by kind, as the arena counts them, and the bytes of the weights."""
    report = Report("memory")
    for name in MODELS[:2] if quick else MODELS:
        with both_models(name) as (model, peer):
            plain = sum(p.numel() * p.element_size() for p in peer.parameters())
            report.add(
                "weights, MiB", {"model": name, "of the checkpoint": plain / 2**20, "held": weight_bytes(model) / 2**20}
            )
            for n_tokens in (64,) if quick else (64, 512, 4096):
                for window in (0, WINDOW, 64):
                    ours = Ours(model, 1, rollback_window=window, budget="1GiB")
                    ours.fill(draw(1, n_tokens))
                    usage = ours.memory.usage()
                    kinds = {f"{kind}, KiB": n_bytes / 1024 for kind, n_bytes in usage.by_kind.items()}
                    row = {"model": name, "tokens": n_tokens, "rollback_window": window, "pages, KiB": 0.0, **kinds}
                    report.add("one sequence", row | {"padding": usage.padding_bytes / usage.used_bytes})
    return report
