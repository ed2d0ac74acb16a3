"""Measures recurrent states: bytes of a rollback window and drift of 16-bit states."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import BambaConfig, Mamba2Config, PreTrainedConfig, Qwen3_5TextConfig

from benchmarks.harness import Report
from hybridmem.memory import HybridMemory, MemorySpec, RecurrentSpec
from hybridmem.memory.recurrences import DeltaRuleShape, SSDShape, mamba1_spec
from hybridmem.models import load_model

WINDOW = 64
LAYERS: dict[str, tuple[RecurrentSpec, float | None]] = {
    "Mamba-2, 128 heads of 64, d_state 128, 1 group": (SSDShape(128, 64, 1, 128, 4).spec(), 0.35),
    "Mamba-2, the same with 8 groups": (SSDShape(128, 64, 8, 128, 4).spec(), None),
    "gated delta, 32 value heads, 16 key heads, 128 x 128": (DeltaRuleShape(32, 16, 128, 128, 4).spec(), 0.6),
    "Kimi delta, 32 heads, 128 x 128": (DeltaRuleShape(32, 32, 128, 128, 4, decays_keys=True).spec(), None),
    "Mamba-1, 8192 channels, d_state 16": (mamba1_spec(8192, 16, 4), None),
}
"""One layer of each, and the part of a state that its window may take."""

PEERS = (
    "Peers, by their own formulas, for the same window of k = 64 tokens: llama.cpp keeps 1 + n_rs_seq state planes a "
    "sequence (llama-memory-recurrent: rows = mem_size * (1 + n_rs_seq)), vLLM a state block for each speculative "
    "token (num_speculative_blocks), SGLang intermediate_ssm of [layers, requests + 1, draft tokens, ...]: 64 states "
    "each."
)


def states(*, quick: bool) -> Report:
    """Measure recurrent states: bytes of a rollback window and drift of 16-bit states."""
    report = Report("states")
    report.notes.append(PEERS)
    _windows(report)
    _drift(report, quick=quick)
    return report


def _windows(report: Report) -> None:
    """Measure the bytes that a sequence holds after a long prompt, by `usage()`.

    Inputs are bf16, states float32.
    """
    for name, (spec, asked) in LAYERS.items():
        for fold in ("replay", "keep"):
            dry = MemorySpec(((spec,),), 32000, torch.bfloat16, torch.device("meta"))
            memory = HybridMemory(dry, "1GiB", rollback_window=WINDOW, fold=fold)  # type: ignore[arg-type]
            sequence = memory.open()
            memory.run(None, {sequence: [1] * 1000})
            # After a whole window, the sequence holds everything that a decoding sequence ever holds.
            for _ in range(WINDOW):
                with memory.step({sequence: [1]}):
                    pass
            usage = memory.usage()
            state = usage.block_bytes["states"]
            report.add(f"a window of {WINDOW} tokens beside one state", {
                "layer": name, "fold": fold, "state, KiB": state / 1024, "tail, KiB": usage.by_kind["tails"] / 1024,
                "tail / state": usage.by_kind["tails"] / state, "asked": asked if asked and fold == "replay" else "-",
                "a copy a token": float(WINDOW), "states held": usage.by_kind["states"] / state,
            })  # fmt: skip


DRIFTING: dict[str, PreTrainedConfig] = {
    "mamba2": Mamba2Config(
        vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_heads=8, head_dim=32, n_groups=1, state_size=64
    ),
    "bamba": BambaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_indices=[2], mamba_n_heads=8, mamba_d_head=32, mamba_d_state=64,
    ),
    "qwen3_5": Qwen3_5TextConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
    ),
}  # fmt: skip


def _drift(report: Report, *, quick: bool) -> None:
    """Measure how far bfloat16 states drift from float32 ones, with everything else in float32.

    This is the worst case: states are rounded at every token.
    """
    from tests.models.checkpoints import write_checkpoint  # These weights let states affect the outputs.

    n_tokens = 128 if quick else 4096
    marks = [n for n in (64, 128, 256, 1024, 4096) if n <= n_tokens]
    for name in ("embedded", *DRIFTING):
        with tempfile.TemporaryDirectory() as folder:
            if name in DRIFTING:
                write_checkpoint(Path(folder), DRIFTING[name])
            model = load_model("embedded" if name == "embedded" else folder, progress=False)
        memories = [
            HybridMemory(model.memory_spec, "256MiB", rollback_window=0, state_dtype=dtype)
            for dtype in (None, torch.bfloat16)
        ]
        sequences = [memory.open() for memory in memories]
        tokens = torch.randint(
            4, model.memory_spec.vocab_size, (n_tokens,), generator=torch.Generator().manual_seed(3)
        ).tolist()
        worst = agreed = 0.0
        for n, token in enumerate(tokens, 1):
            exact, rounded = (
                _step(model, memory, sequence, token) for memory, sequence in zip(memories, sequences, strict=True)
            )
            worst = max(worst, float((rounded - exact).abs().max() / exact.std()))
            agreed += float(exact.argmax() == rounded.argmax())
            if n in marks:
                apart = float((rounded - exact).square().mean().sqrt() / exact.std())
                divergence = float((exact.softmax(-1) * (exact.log_softmax(-1) - rounded.log_softmax(-1))).sum())
                report.add("drift of bfloat16 states", {
                    "model": name, "token": n, "rms of logits / their std": apart, "worst so far / std": worst,
                    "KL, nats": divergence, "same first choice so far": agreed / n,
                })  # fmt: skip


def _step(model, memory: HybridMemory, sequence, token: int) -> torch.Tensor:
    with memory.step({sequence: token}) as step:
        logits: torch.Tensor = model(step)[0]
    return logits
