"""Attention with a budget: answers of the embedded model against what it may keep, and what a long context costs to decode."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.harness import Report, interleave
from benchmarks.workloads import Ours, draw
from chat.dialogues import make_dialogue, messages
from memory import AttentionSpec, HybridMemory, MemorySpec, Step
from memory.eviction import H2O, TOVA, Budget, EvictionPolicy, ExpectedAttention, KNorm, PyramidKV, Quest, Recent, Scissorhands, SnapKV
from models import EMBEDDED, LanguageModel, load_model

_POLICIES = (Recent, KNorm, H2O, Scissorhands, TOVA, SnapKV, PyramidKV, ExpectedAttention, Quest)
_SHARES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
_WINDOW, _EVERY, _CHUNK = 8, 8, 64
_PAGE_TOKENS = 4  # of 16, a fifth of these dialogues would be three pages, two of them the newest
_TABLE = "answers of the embedded model"

Dialogue = tuple[list[int], list[int]]
"""Token ids up to the last answer, and the answer's."""


def sparse(*, quick: bool, plot: Path | None = None) -> Report:
    report = Report("sparse")
    _quality(report, n_dialogues=20 if quick else 200, shares=(0.2, 1.0) if quick else _SHARES)
    if plot is not None:
        plot_quality(report, plot)
    _speed(report, n_tokens=1024 if quick else 8192, n_rounds=5 if quick else 40)
    return report


def _quality(report: Report, *, n_dialogues: int, shares: tuple[float, ...]) -> None:
    model, dialogues = load_model("embedded"), _dialogues(AutoTokenizer.from_pretrained(EMBEDDED), n_dialogues)
    mean_tokens = sum(len(prompt) for prompt, _ in dialogues) / n_dialogues
    dense_share, dense_bytes = _answer(model, model.memory_spec, dialogues)
    report.notes.append(
        f"{n_dialogues} dialogues of {mean_tokens:.0f} tokens on average, with facts that training never showed. When the last question is "
        f"asked, all but the newest {_WINDOW} to {_WINDOW + _EVERY} tokens have folded, {_EVERY} at a time. The model's recurrent layers "
        "remember as ever. An answer is right if no token of it is wrong. Bytes are the arena's, tails included. Quest keeps every row, "
        f"and reads pages of {_PAGE_TOKENS} when an answer is said."
    )
    report.notes.append(
        "Of this model's two attention layers the second answers, and reads mostly one row for it: the value that was told. The question "
        "comes when that row has folded long ago, and nobody had asked for it. SnapKV, PyramidKV and TOVA judge rows by the last queries, "
        "among which the benchmarks of the literature have the question. H2O and Scissorhands add up what a row received, so one that has "
        "just folded competes, after two folds of queries, with sums over a whole dialogue. KNorm keeps short keys, and here the rows "
        "that are read have long ones. ExpectedAttention asks each query about each row, and averages over folds."
    )
    row: dict[str, str | int | float] = {"policy": "dense", "budget, share": 1.0, "budget, tokens": "-", "right, %": 100 * dense_share}
    report.add(_TABLE, row | {"of dense, %": 100.0, "bytes of dense, %": 100.0})
    for kind in _POLICIES:
        for share in shares:
            policy = _policy(kind, max(1, round(share * mean_tokens)))
            right, n_bytes = _answer(model, model.memory_spec.with_policy(policy), dialogues)
            report.add(_TABLE, {
                "policy": kind.__name__, "budget, share": share, "budget, tokens": policy.budget_tokens, "right, %": 100 * right,
                "of dense, %": 100 * right / dense_share, "bytes of dense, %": 100 * n_bytes / dense_bytes,
            })  # fmt: skip


def plot_quality(report: Report, path: Path) -> None:
    """Answers against bytes, both as shares of dense attention's; a line a policy. Needs matplotlib (the `notebooks` extra)."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        report.notes.append('No plot: matplotlib is not installed (`pip install -e ".[notebooks]"`).')
        return
    figure, panel = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in report.tables[_TABLE]:
        lines.setdefault(str(row["policy"]), []).append((float(row["bytes of dense, %"]), float(row["of dense, %"])))
    for name, points in lines.items():
        panel.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=name)
    panel.set(xlabel="bytes of attention, % of dense", ylabel="right answers, % of dense", xlim=(0, None), ylim=(0, 105))
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


def _dialogues(tokenizer: PreTrainedTokenizerBase, n: int) -> list[Dialogue]:
    rng, found = random.Random(5), []
    while len(found) < n:
        turns = make_dialogue(rng, 20, held_out=True, talk=0.4)
        prompt = tokenizer.apply_chat_template(messages(turns)[:-1], add_generation_prompt=True)["input_ids"]
        found.append((prompt, [*tokenizer.encode(turns[-1].reply), tokenizer.eos_token_id]))
    return found


def _answer(model: LanguageModel, spec: MemorySpec, dialogues: list[Dialogue]) -> tuple[float, int]:
    """Share of dialogues answered right, and the bytes that attention held before the answers."""
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
    """A model of one attention of usual sizes, and nothing else: what is timed is what attention costs."""

    def __init__(self, policy: EvictionPolicy | None) -> None:
        spec = AttentionSpec(12, 4, 64, policy=policy)
        self.memory_spec = MemorySpec(((spec,),), vocab_size=32000, model="one attention")
        self._q, self._kv = torch.randn(32000, 12, 64), torch.randn(32000, 2, 4, 64)

    def __call__(self, step: Step) -> torch.Tensor:
        k, v = self._kv[step.token_ids].unbind(1)
        return step.select(step.attend(0, self._q[step.token_ids], k, v).flatten(1))


def _speed(report: Report, *, n_tokens: int, n_rounds: int) -> None:
    """A decode step of eight sequences: dense attention, and a fifth of it."""
    runs = {}
    for name, policy in (("dense", None), ("H2O", H2O(n_tokens // 5)), ("Recent", Recent(n_tokens // 5))):
        ours = Ours(_OneAttention(policy), 8, budget="2GiB")  # type: ignore[arg-type]
        ours.fill(draw(8, n_tokens))
        runs[name] = ours.decode
    times = interleave(runs, n_rounds, n_warm_up=3)
    for name, samples in times.items():
        report.add(f"one attention, a decode step of 8 sequences after {n_tokens} tokens, ms", {
            "kept": name, "median": samples.median_ms, "mean, folds included": samples.mean_ms,
            "dense / this": times["dense"].median_ms / samples.median_ms, "asked": "-" if name == "dense" else 2.0,
        })  # fmt: skip
