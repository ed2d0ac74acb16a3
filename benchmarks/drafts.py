"""Measures the engine with drafts, for several requests at once, against the engine without drafts.

Drafts come by prompt lookup, and from a small model.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Report
from benchmarks.ours import VOCAB
from benchmarks.speculative import NOTE, PERIOD, SCALES, repeating_model
from hybridmem.chat.engine.draft_models import ModelDrafter
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.memory import HybridMemory
from hybridmem.models import LanguageModel, load_model

LOADS = (1, 8, 32)
N_TOKENS = 96
_ADVERSE = Sampling(temperature=1.2, seed=7)
_OF_EMBEDDED = {"the embedded model, drawn": _ADVERSE, "the embedded model, greedy": Sampling()}
_SCALES = {f"Jamba 120M, {name}": scale for name, scale in SCALES.items()}
TEXTS = (*_OF_EMBEDDED, *_SCALES)
_ADVERSE_NOTE = (
    "Drafts cannot pay where the text repeats its words and not what follows them: the embedded model at a temperature "
    "of 1.2, with 932 tokens. There the rule has to find out that they do not, and to stop. A second engine without "
    "drafts says how much of a ratio is the machine's."
)


def measure(
    *, quick: bool = False, texts: Sequence[str] = (), rounds: int | None = None, out: Path | None = None
) -> Report:
    """Measure tokens a second with and without drafts, for texts in which drafts pay and in which they do not.

    Args:
        texts: names of `TEXTS` to measure; empty means all. Rows of other texts that the report in `out` has are kept.
    """
    report = Report("drafts")
    report.notes += [_ADVERSE_NOTE, NOTE]
    rounds = rounds or (3 if quick else 9)
    embedded = load_model("embedded")
    for text in texts or TEXTS[: 3 if quick else None]:
        if text in _OF_EMBEDDED:
            prompts = [[random.Random(i).randrange(10, 932) for _ in range(24)] for i in range(max(LOADS))]
            _compare(report, text, embedded, 932, prompts, _OF_EMBEDDED[text], rounds)
            continue
        # A reply repeats its prompt, as an edited file does. Each request has a cycle of its own.
        prompts = [[*range(i * PERIOD, (i + 1) * PERIOD)] * 4 for i in range(10, 10 + max(LOADS))]
        with repeating_model(_SCALES[text]) as model:
            _compare(report, text, model, VOCAB, prompts, Sampling(), rounds)
    report.keep(out, "text", "requests")
    return report


def _compare(
    report: Report, text: str, model: LanguageModel, n_vocab: int, prompts: list[list[int]], sampling: Sampling,
    rounds: int,
) -> None:  # fmt: skip
    for load in LOADS:
        engines = {
            "without": _engine(model, Speculation()),
            "prompt lookup": _engine(model, Speculation(looks_up=True)),
            "without again": _engine(model, Speculation()),
            "draft model": _engine(model, Speculation(drafter=_drafter(n_vocab))),
        }
        if sampling == Sampling():  # Under other samplings it is known that drafting at every step is slow.
            engines["always"] = _engine(model, Speculation(looks_up=True, adapts=False))
        ratios, seconds = _ratios(engines, prompts[:load], sampling, rounds)
        stats = engines["prompt lookup"].stats
        row = {"text": text, "requests": load, "tokens/s without": load * N_TOKENS / seconds}
        for name in ("prompt lookup", "draft model", "without again", "always"):
            row[name] = ratios.get(name, "-")
        row["drafted a token"] = stats.n_drafted / stats.n_generated
        row["right"] = stats.n_accepted / stats.n_drafted if stats.n_drafted else 0.0
        stats = engines["draft model"].stats
        row["drafted a token by the model"] = stats.n_drafted / stats.n_generated
        row["right of the model's"] = stats.n_accepted / stats.n_drafted if stats.n_drafted else 0.0
        report.add("tokens a second with drafts against without", row)


def _ratios(
    engines: dict[str, Engine], prompts: list[list[int]], sampling: Sampling, rounds: int
) -> tuple[dict[str, float], float]:
    """Return each engine's median speedup over the engine without drafts, and the seconds of the engine without drafts.

    In each round, all engines generate the same texts, one after the other in random order. The first round is a
    warm-up.
    """
    seconds, said = {name: list[float]() for name in engines}, dict[str, list[list[int]]]()
    rng = random.Random(0)
    for _ in range(1 + rounds):
        for name in rng.sample(sorted(engines), len(engines)):
            started = time.perf_counter()
            said[name] = _decode(engines[name], prompts, sampling)
            seconds[name].append(time.perf_counter() - started)
        assert all(ids == said["without"] for ids in said.values()), "drafts have changed a reply"
    plain = seconds["without"][1:]
    medians = {
        name: statistics.median(a / b for a, b in zip(plain, own[1:], strict=True)) for name, own in seconds.items()
    }
    return medians, statistics.median(plain)


def _drafter(n_vocab: int) -> ModelDrafter:
    """Return a drafter with a Llama of one layer, which finds the next token on a cycle as the repeating Jamba does."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=n_vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    peer, token_ids = LlamaForCausalLM(config), torch.arange(n_vocab)
    follows = (token_ids // PERIOD * PERIOD + (token_ids + 1) % PERIOD).clamp(max=n_vocab - 1)
    with torch.no_grad():
        embedding = peer.get_input_embeddings().weight
        embedding *= 8
        peer.get_output_embeddings().weight[follows] = embedding
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        small = load_model(folder, progress=False)
    return ModelDrafter(small, HybridMemory(small.memory_spec, "256MiB", rollback_window=32))


def _engine(model: LanguageModel, speculation: Speculation) -> Engine:
    memory = HybridMemory(model.memory_spec, "1GiB", rollback_window=32)
    return Engine(model, memory, None, stop_ids=(), speculation=speculation)


def _decode(engine: Engine, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    generations = [engine.submit(prompt, max_tokens=N_TOKENS, sampling=sampling) for prompt in prompts]
    engine.run()
    return [generation.token_ids for generation in generations]
