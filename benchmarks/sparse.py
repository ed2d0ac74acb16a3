"""Measures attention with a budget of rows or with rows in few bits: quality, and the time of a step at a long context.

Quality is the embedded model's share of right answers, for several numbers of bytes that attention may keep.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.harness import Report, interleave
from benchmarks.ours import Ours, draw
from hybridmem.chat.simulation.dialogues import make_dialogue, messages
from hybridmem.memory import AttentionSpec, HybridMemory, MemorySpec, Step
from hybridmem.memory.eviction import (
    H2O,
    TOVA,
    Budget,
    EvictionPolicy,
    ExpectedAttention,
    KNorm,
    PyramidKV,
    Quest,
    Recent,
    Scissorhands,
    SnapKV,
)
from hybridmem.memory.quantization import Float8, Quantized, Storage
from hybridmem.models import EMBEDDED, LanguageModel, load_model

POLICIES = (Recent, KNorm, H2O, Scissorhands, TOVA, SnapKV, PyramidKV, ExpectedAttention, Quest)
_SHARES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
_WINDOW, _EVERY, _CHUNK = 8, 8, 64
_STORAGES = (Quantized(8, group=16), Float8(group=16), Quantized(4, group=16), Quantized(2, group=16))
_SHARE_IN_BITS = 0.2
_UNEVEN = (0.05, 0.35)
"""A budget for each attention layer, little for the first, which answers little.
Chosen on other dialogues (seed 7): 96 % there.
"""
_PAGE_TOKENS = 4  # With 16 tokens in a page, a fifth of these dialogues would be three pages, two of them the newest.
_TABLE = "answers of the embedded model"

Dialogue = tuple[list[int], list[int]]
"""Token ids of a dialogue up to its last answer, and those of the answer."""


def sparse(*, quick: bool, plot: Path | None = None) -> Report:
    report = Report("sparse")
    _quality(report, n_dialogues=20 if quick else 200, shares=(0.2, 1.0) if quick else _SHARES)
    if plot is not None:
        plot_quality(report, plot)
    _speed(report, n_tokens=1024 if quick else 8192, n_rounds=5 if quick else 40)
    return report


def _quality(report: Report, *, n_dialogues: int, shares: tuple[float, ...]) -> None:
    model, dialogues = load_model("embedded"), draw_dialogues(AutoTokenizer.from_pretrained(EMBEDDED), n_dialogues)
    mean_tokens = sum(len(prompt) for prompt, _ in dialogues) / n_dialogues
    dense_share, dense_bytes = answer(model, model.memory_spec, dialogues)
    report.notes.append(
        f"{n_dialogues} dialogues of {mean_tokens:.0f} tokens on average, with facts that training never showed. When "
        f"the last question is asked, all but the newest {_WINDOW} to {_WINDOW + _EVERY} tokens have folded, {_EVERY} "
        "at a time. The model's recurrent layers remember as ever. An answer is right if no token of it is wrong. "
        f"Bytes are the arena's, tails included. Quest keeps every row, and reads pages of {_PAGE_TOKENS} when an "
        f"answer is said. Exact numbers are float32; those in bits share scales by {_STORAGES[0].group}."
    )
    report.notes.append(
        "Of this model's two attention layers the second answers, and reads mostly one row for it: the value that was "
        "told. The question comes when that row has folded long ago, and nobody had asked for it. SnapKV, PyramidKV "
        "and TOVA judge rows by the last queries, among which the benchmarks of the literature have the question. H2O "
        "and Scissorhands add up what a row received, so one that has just folded competes, after two folds of "
        "queries, with sums over a whole dialogue. KNorm keeps short keys, and here the rows that are read have long "
        "ones. ExpectedAttention asks each query about each row, and averages over folds."
    )

    def add(policy: Budget | None, storage: Storage | None, share: float) -> None:
        label = storage.label if storage else "exact"
        spec = model.memory_spec.with_policy(policy).with_storage(storage)
        measure(
            type(policy).__name__ if policy else "dense", label, share, policy.budget_tokens if policy else "-", spec
        )

    def measure(policy: str, numbers: str, share: float, n_tokens: int | str, spec: MemorySpec) -> None:
        right, n_bytes = (dense_share, dense_bytes) if spec == model.memory_spec else answer(model, spec, dialogues)
        report.add(_TABLE, {
            "policy": policy, "numbers": numbers, "budget, share": share, "budget, tokens": n_tokens,
            "right, %": 100 * right, "of dense, %": 100 * right / dense_share,
            "bytes of dense, %": 100 * n_bytes / dense_bytes,
        })  # fmt: skip

    for storage in (None, *_STORAGES):
        add(None, storage, 1.0)
    for kind in POLICIES:
        for share in shares:
            add(_policy(kind, max(1, round(share * mean_tokens))), None, share)
        for storage in _STORAGES:
            add(_policy(kind, round(_SHARE_IN_BITS * mean_tokens)), storage, _SHARE_IN_BITS)
    spec, n_tokens = model.memory_spec, [round(share * mean_tokens) for share in _UNEVEN]
    for (layer, _), budget in zip(spec.of_kind("attention"), n_tokens, strict=True):
        spec = spec.with_policy(_policy(ExpectedAttention, budget), layers=[layer])
    measure("ExpectedAttention by layer", "exact", sum(_UNEVEN) / 2, " and ".join(map(str, n_tokens)), spec)


def plot_quality(report: Report, path: Path) -> None:
    """Plot right answers over bytes, both as shares of those of dense attention, with a line for each policy.

    Needs matplotlib (the `notebooks` extra).
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        report.notes.append('No plot: matplotlib is not installed (`pip install -e ".[notebooks]"`).')
        return
    figure, panel = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in report.tables[_TABLE]:
        name = str(row["policy"]) if row["numbers"] == "exact" else f"{row['policy']}, in bits"
        if row["numbers"] != "exact" and row["policy"] not in ("dense", "ExpectedAttention"):
            continue  # The lines of all of them would hide each other.
        lines.setdefault(name, []).append((float(row["bytes of dense, %"]), float(row["of dense, %"])))
    for name, points in lines.items():
        panel.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=name)
    panel.set(
        xlabel="bytes of attention, % of dense", ylabel="right answers, % of dense", xlim=(0, None), ylim=(0, 105)
    )
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _policy(kind: type[Budget], budget: int) -> Budget:
    if issubclass(kind, Quest):
        return kind(budget, recent=_PAGE_TOKENS)
    assert issubclass(kind, EvictionPolicy)
    protected = 0 if kind is Recent else min(8, budget // 4)
    policy = kind(budget, every=_EVERY, sinks=min(4, budget // 4), recent=protected)
    return replace(policy, observed=_EVERY) if isinstance(policy, SnapKV) else policy


def draw_dialogues(tokenizer: PreTrainedTokenizerBase, n: int) -> list[Dialogue]:
    rng, found = random.Random(2026), []
    while len(found) < n:
        turns = make_dialogue(rng, 20, held_out=True, talk=0.4)
        prompt = tokenizer.apply_chat_template(messages(turns)[:-1], add_generation_prompt=True)["input_ids"]
        found.append((prompt, [*tokenizer.encode(turns[-1].reply), tokenizer.eos_token_id]))
    return found


def answer(model: LanguageModel, spec: MemorySpec, dialogues: list[Dialogue]) -> tuple[float, int]:
    """Return the share of dialogues answered right, and the bytes that attention held before the answers."""
    memory = HybridMemory(spec, "1GiB", rollback_window=_WINDOW, page_tokens=_PAGE_TOKENS)
    sequences = [memory.open() for _ in dialogues]
    for begin in range(0, max(len(prompt) for prompt, _ in dialogues), _CHUNK):
        requests = {s: prompt[:-1][begin : begin + _CHUNK] for s, (prompt, _) in zip(sequences, dialogues, strict=True)}
        with memory.step({s: tokens for s, tokens in requests.items() if tokens}) as step:
            model(step)
    n_bytes = sum(n for kind, n in memory.usage().by_kind.items() if "attention" in kind or "pages" in kind)
    answers = {s: [prompt[-1], *reply[:-1]] for s, (prompt, reply) in zip(sequences, dialogues, strict=True)}
    with memory.step(answers, outputs="all") as step:
        rows = step.split(model(step))
    right = [r.argmax(-1).tolist() == reply for r, (_, reply) in zip(rows, dialogues, strict=True)]
    return sum(right) / len(right), n_bytes


class _OneAttention:
    """Holds a model of one attention layer of usual size and nothing else, so that only attention is timed."""

    def __init__(self, policy: Budget | None, storage: Storage | None) -> None:
        spec = AttentionSpec(12, 4, 64, policy=policy, storage=storage)
        self.memory_spec = MemorySpec(((spec,),), vocab_size=32000, model="one attention")
        self._q, self._kv = torch.randn(32000, 12, 64), torch.randn(32000, 2, 4, 64)

    def __call__(self, step: Step) -> torch.Tensor:
        k, v = self._kv[step.token_ids].unbind(1)
        return step.select(step.attend(0, self._q[step.token_ids], k, v).flatten(1))


def _speed(report: Report, *, n_tokens: int, n_rounds: int) -> None:
    """Measure a decode step of eight sequences: dense attention, a fifth of the rows, and rows in few bits."""
    budget = n_tokens // 5
    kinds: list[tuple[Budget | None, Storage | None]] = [
        (None, None), (H2O(budget), None), (Recent(budget), None), (Quest(budget), None),
        *((None, storage) for storage in (Quantized(8), Float8(), Quantized(4), Quantized(2))),
        (H2O(budget), Quantized(4)),
    ]  # fmt: skip
    runs, asked = {}, {}
    for policy, storage in kinds:
        name = ", ".join(x.label for x in (policy, storage) if x) or "dense"
        ours = Ours(_OneAttention(policy, storage), 8, budget="2GiB")  # type: ignore[arg-type]
        ours.fill(draw(8, n_tokens))
        runs[name], asked[name] = ours.decode, 2.0 if policy else 1 / 1.3 if storage else "-"
    times = interleave(runs, n_rounds, n_warm_up=3)
    for name, samples in times.items():
        report.add(f"one attention, a decode step of 8 sequences after {n_tokens} tokens, ms", {
            "kept": name, "median": samples.median_ms, "mean, folds included": samples.mean_ms,
            "dense / this": times["dense"].median_ms / samples.median_ms, "asked": asked[name],
        })  # fmt: skip
