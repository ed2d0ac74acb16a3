"""Measures how many new sequences fit into the holes that closed sequences have left, and the bytes moved for them.

The memories are dry: these are the worst case for holes, and nothing but bookkeeping is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from transformers import GraniteMoeHybridConfig, JambaConfig

from benchmarks.harness import Report
from hybridmem.memory import CapacityError, HybridMemory, MemorySpec, Sequence
from hybridmem.models import load_model, plan_memory

CASES = (("embedded", 100, "64MiB"), ("Jamba, 12 layers", 200, "2GiB"), ("Granite 4, 40 layers", 80, "8GiB"))
"""Model, sequences that decode together, and budget."""


def holes(*, quick: bool) -> Report:
    """Decode sequences together until the budget is full, close every other one, and open new ones of one token."""
    report = Report("holes")
    for name, n_sequences, budget in CASES[:1] if quick else CASES:
        spec = _spec(name)
        for fold in ("keep", "replay", "defer"):
            memory = HybridMemory(spec, budget, device="meta", fold=fold)
            live = [memory.open() for _ in range(n_sequences)]
            n_tokens = _until_full(memory, lambda: live)  # noqa: B023
            for sequence in live[::2]:
                memory.close(sequence)
            one, free_bytes, started = memory.needed_bytes(1), memory.free_bytes, time.perf_counter()
            n_opened = _until_full(memory, lambda: [memory.open()])  # noqa: B023
            seconds, moved_bytes = time.perf_counter() - started, memory.counters.moved_bytes
            memory.check()
            report.add("new sequences of one token", {
                "model": name, "budget": budget, "fold": fold, "decoded together": n_sequences, "tokens each": n_tokens,
                "then free, %": 100 * free_bytes / memory.budget_bytes, "fit by bytes": free_bytes // one,
                "opened": n_opened, "free when refused, %": 100 * memory.free_bytes / memory.budget_bytes,
                "moved, bytes a byte opened": moved_bytes / max(1, n_opened * one),
                "ms a sequence": 1e3 * seconds / max(1, n_opened),
            })  # fmt: skip
    return report


def _until_full(memory: HybridMemory, pick: Callable[[], list[Sequence]]) -> int:
    """Feed a token to each of the sequences that are picked, again and again; return how often there was room."""
    n = 0
    while True:
        try:
            memory.run(None, {sequence: [1] for sequence in pick()})
        except CapacityError:
            return n
        n += 1


def _spec(name: str) -> MemorySpec:
    if name == "embedded":
        return load_model("embedded").memory_spec
    if name.startswith("Jamba"):
        jamba = JambaConfig(
            vocab_size=1000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
            attn_layer_period=6, attn_layer_offset=3, num_experts=1, num_experts_per_tok=1,
        )  # fmt: skip
        return plan_memory(jamba, "JambaForCausalLM")
    kinds = ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)]
    granite = GraniteMoeHybridConfig(
        vocab_size=1000, hidden_size=1536, num_hidden_layers=40, layer_types=kinds, num_attention_heads=12,
        num_key_value_heads=4, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1,
        num_local_experts=4, num_experts_per_tok=2, intermediate_size=512, shared_intermediate_size=1024,
    )  # fmt: skip
    return plan_memory(granite, "GraniteMoeHybridForCausalLM")
