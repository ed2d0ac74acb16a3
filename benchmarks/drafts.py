"""Measures drafts by prompt lookup in the engine, for several requests at once, against the engine without them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from benchmarks.harness import Report, interleave
from benchmarks.speculative import NOTE, SCALES, repeating_model
from benchmarks.workloads import VOCAB
from chat.decoding.sampling import Sampling
from chat.engine.drafting import Speculation
from chat.engine.engine import Engine
from memory import HybridMemory
from models import LanguageModel, load_model

LOADS = (1, 8, 32)
N_TOKENS = 96
_ADVERSE = Sampling(temperature=1.2, seed=7)
_ADVERSE_NOTE = (
    "Drafts cannot pay where the text repeats its words and not what follows them: the embedded model at a temperature "
    "of 1.2, with 932 tokens. There the rule has to find out that they do not, and to stop. A second engine without "
    "drafts says how much of a ratio is the machine's."
)


def measure(*, quick: bool = False) -> Report:
    """Measure tokens a second with and without drafts, for texts in which drafts pay and in which they do not."""
    report = Report("drafts")
    report.notes += [_ADVERSE_NOTE, NOTE]
    rounds = 3 if quick else 7
    embedded = load_model("embedded")
    _compare(report, "the embedded model, drawn", embedded, 932, _ADVERSE, rounds)
    _compare(report, "the embedded model, greedy", embedded, 932, Sampling(), rounds)
    for name, scale in list(SCALES.items())[: 1 if quick else None]:
        with repeating_model(scale) as model:
            _compare(report, f"Jamba 120M, {name}", model, VOCAB, Sampling(), max(2, rounds // 2))
    return report


def _compare(report: Report, text: str, model: LanguageModel, n_vocab: int, sampling: Sampling, rounds: int) -> None:
    for load in LOADS:
        engines = {
            "without": _engine(model, Speculation()),
            "prompt lookup": _engine(model, Speculation(looks_up=True)),
            "always": _engine(model, Speculation(looks_up=True, adapts=False)),
            "without again": _engine(model, Speculation()),
        }
        prompts = [[random.Random(i).randrange(10, n_vocab) for _ in range(24)] for i in range(load)]
        said: dict[str, list[list[int]]] = {}
        runs: dict[str, Callable[[], object]] = {
            name: partial(_decode, engine, prompts, sampling, said.setdefault(name, []))
            for name, engine in engines.items()
        }
        samples = interleave(runs, rounds)
        assert said["prompt lookup"] == said["without"], "drafts have changed a reply"
        plain = samples["without"].median_ms
        stats = engines["prompt lookup"].stats
        row = {"text": text, "requests": load, "tokens/s without": load * N_TOKENS / plain * 1e3}
        for name in ("prompt lookup", "always", "without again"):
            row[name] = plain / samples[name].median_ms
        row["drafted a token"] = stats.n_drafted / stats.n_generated
        row["right"] = stats.n_accepted / stats.n_drafted if stats.n_drafted else 0.0
        report.add("tokens a second with drafts against without", row)


def _engine(model: LanguageModel, speculation: Speculation) -> Engine:
    memory = HybridMemory(model.memory_spec, "1GiB", rollback_window=32)
    return Engine(model, memory, None, stop_ids=(), speculation=speculation)


def _decode(engine: Engine, prompts: list[list[int]], sampling: Sampling, said: list[list[int]]) -> None:
    generations = [engine.submit(prompt, max_tokens=N_TOKENS, sampling=sampling) for prompt in prompts]
    engine.run()
    said[:] = [generation.token_ids for generation in generations]
