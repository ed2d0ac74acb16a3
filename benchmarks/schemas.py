"""Measures structured output: whether replies are valid, and how much time masks add to a step of the model."""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from torch import Tensor

from benchmarks.harness import Report
from benchmarks.schema_generator import make_schemas
from hybridmem.chat.engine.choose import Choice, Plan, choose_tokens
from hybridmem.chat.engine.engine import Engine, Generation, Sampling
from hybridmem.chat.engine.output import Output
from hybridmem.chat.prompts import encode_chat, load_tokenizer
from hybridmem.chat.sampling.grammar import GrammarError, Grammars
from hybridmem.chat.sampling.masks import mask_rows_
from hybridmem.memory import HybridMemory
from hybridmem.models import EMBEDDED, LanguageModel, load_model

TABLES = ("masks", "validity", "libraries")
MOST_TOKENS = 600
_ASKED = [{"role": "user", "content": "Who is it?"}]
_CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


@dataclass
class Parts:
    """Holds what structured output needs: the embedded model, its tokenizer, and the compiler of grammars for it."""

    model: LanguageModel
    tokenizer: Any
    grammars: Grammars
    prompt: list[int]

    @staticmethod
    def load() -> Parts:
        model, tokenizer = load_model("embedded"), load_tokenizer(EMBEDDED)
        grammars = Grammars(tokenizer, model.memory_spec.vocab_size, (tokenizer.eos_token_id,))
        return Parts(model, tokenizer, grammars, encode_chat(tokenizer, _ASKED))


def write_all(parts: Parts, schemas: list[dict[str, Any]]) -> list[Generation | str]:
    """Return the embedded model's sampled reply for each schema, or a text that says why the schema was refused."""
    engine = Engine(parts.model, HybridMemory(parts.model.memory_spec, "1GiB"), parts.tokenizer, max_running=32)
    written = list[Generation | str]()
    for seed, schema in enumerate(schemas):
        try:
            grammar = parts.grammars.json_schema(schema)
        except GrammarError as error:
            written.append(str(error))
            continue
        sampling = Sampling(temperature=1.0, seed=seed, length_decay=(40, 1.1))
        written.append(
            engine.submit(parts.prompt, max_tokens=MOST_TOKENS, sampling=sampling, output=Output(grammar=grammar))
        )
    engine.run()
    return written


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Tell whether a text is JSON that is valid by its schema; jsonschema decides."""
    try:
        jsonschema.Draft202012Validator(schema, format_checker=_CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def schemas_(*, quick: bool, tables: Sequence[str] = (), out: Path | None = None) -> Report:
    """Generate replies for 1,000 schemas, and measure what masks add to steps of 1, 8 and 32 requests.

    Args:
        tables: names of `TABLES` to measure; empty means all. Other tables that the report in `out` has are kept.
    """
    report, parts = Report("schemas"), Parts.load()
    cases = make_schemas(100 if quick else 1000)
    tables = tables or TABLES
    for n in (1, 8, 32) if "masks" in tables else ():
        report.add("masks beside steps of the embedded model", _mask_share(parts, cases, n))
    if "validity" in tables:
        _report_validity(report, parts, cases)
    if "libraries" in tables:
        report.add("libraries, one schema after the other", _of_llguidance(parts, cases))
        if importlib.util.find_spec("xgrammar") is not None:
            report.add("libraries, one schema after the other", _of_xgrammar(parts, cases))
        else:
            report.notes.append("Not measured, because not installed: xgrammar (`pip install xgrammar`).")
    report.keep_tables(out)
    report.notes.append(
        f"Finished: the reply ended with 'stop'; cut: after {MOST_TOKENS} tokens. A mask's time is what a step "
        "waits for the masks of all its requests, which a thread computes beside the model, and that of applying them; "
        "a step's is that of the engine, masks included. The embedded model "
        "has 1.2 million parameters and a vocabulary of 932: no model makes shorter steps."
    )
    return report


def _report_validity(report: Report, parts: Parts, cases: list[tuple[str, dict[str, Any]]]) -> None:
    counts: dict[str, Counter[str]] = {}
    for (family, schema), written in zip(cases, write_all(parts, [schema for _, schema in cases]), strict=True):
        count = counts.setdefault(family, Counter())
        count["schemas"] += 1
        if isinstance(written, str):
            count["refused"] += 1
            report.notes.append(f"Refused: {written}.")
        elif written.finish_reason == "stop":
            count["finished"] += 1
            count["valid"] += is_valid(written.text, schema)
        elif written.finish_reason == "length":
            count["cut"] += 1
        else:
            report.notes.append(f"Failed: {written.error}; {json.dumps(schema)[:200]}")
    total = sum(counts.values(), Counter[str]())
    for family, count in [*counts.items(), ("all", total)]:
        names = ("schemas", "refused", "finished", "valid", "cut")
        report.add("validity", {"family": family, **{name: count[name] for name in names}})


def _mask_share(parts: Parts, cases: list[tuple[str, dict[str, Any]]], n_requests: int) -> dict[str, Any]:
    """Return the median time of steps in which all `n_requests` requests decode, and the median time that masks add.

    Masks are computed in another thread while the model runs. They add the time in which the step then waits for them,
    and the time of applying them.
    """
    masks, steps = list[float](), list[float]()

    def choose(logits_SV: Tensor, plan: Plan) -> list[Choice]:
        matchers = [(i, job.sampler.matcher) for i, (job, _) in enumerate(plan) if job.sampler and job.sampler.matcher]
        if len(matchers) == len(plan) == n_requests:
            scores_SV = logits_SV.float().clone()
            started = time.perf_counter()
            # The masks are applied once more than needed, because the sampler applies them again.
            mask_rows_(scores_SV, matchers)
            masks.append(time.perf_counter() - started)
        else:
            masks.append(-1.0)
        return choose_tokens(logits_SV, plan)

    memory = HybridMemory(parts.model.memory_spec, "1GiB")
    engine = Engine(parts.model, memory, parts.tokenizer, max_running=n_requests, choose=choose)
    chosen = random.Random(n_requests).sample([schema for _, schema in cases], min(len(cases), 3 * n_requests + 20))
    for seed, schema in enumerate(chosen):
        sampling = Sampling(temperature=1.0, seed=seed, length_decay=(40, 1.1))
        engine.submit(
            parts.prompt, max_tokens=100, sampling=sampling, output=Output(grammar=parts.grammars.json_schema(schema))
        )
    while not engine.is_idle:
        n_before, before, waited = len(masks), engine.stats.seconds, engine.stats.mask_seconds
        engine.step()
        if len(masks) > n_before and masks[-1] >= 0:
            steps.append(engine.stats.seconds - before - masks[-1])
            masks[-1] += engine.stats.mask_seconds - waited
        elif len(masks) > n_before:
            masks.pop()
    mask_ms, step_ms = (statistics.median(found) * 1e3 for found in (masks, steps))
    return {
        "requests": n_requests,
        "mask, ms": mask_ms,
        "step, ms": step_ms,
        "share, %": 100 * mask_ms / step_ms,
        "asked": "5",
    }


def _of_llguidance(parts: Parts, cases: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    grammars = Grammars(parts.tokenizer, parts.model.memory_spec.vocab_size, (parts.tokenizer.eos_token_id,))
    grammars.json_schema({"type": "null"})  # The first schema makes the library read the vocabulary.
    reads, fills, rng = list[float](), list[float](), random.Random(0)
    for _, schema in cases:
        started = time.perf_counter()
        matcher = grammars.json_schema(schema | {"title": "read anew"}).matcher()
        reads.append(time.perf_counter() - started)
        bits = np.zeros((1, (parts.model.memory_spec.vocab_size + 31) // 32), np.int32)
        for _ in range(40):
            if matcher.is_stopped:
                break
            started = time.perf_counter()
            matcher.library.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            fills.append(time.perf_counter() - started)
            matcher.add(_draw(rng, bits, parts))
    return _row("llguidance", reads, fills, "one wheel, 7.6 MB, no dependency")


def _of_xgrammar(parts: Parts, cases: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(parts.tokenizer, vocab_size=parts.model.memory_spec.vocab_size)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    compiler.compile_json_schema('{"type": "null"}')
    reads, fills, rng, n_refused = list[float](), list[float](), random.Random(0), 0
    for _, schema in cases:
        started = time.perf_counter()
        try:
            matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema), strict_mode=False))
        except Exception:  # The library does not support this schema.
            n_refused += 1
            continue
        reads.append(time.perf_counter() - started)
        bits = xgrammar.allocate_token_bitmask(1, parts.model.memory_spec.vocab_size)
        for _ in range(40):
            if matcher.is_terminated():
                break
            started = time.perf_counter()
            matcher.fill_next_token_bitmask(bits, 0)
            fills.append(time.perf_counter() - started)
            matcher.accept_token(_draw(rng, bits.numpy(), parts))
    return _row("xgrammar", reads, fills, f"3.8 MB, and apache-tvm-ffi, 13 MB, and triton; refused {n_refused}")


def _draw(rng: random.Random, bits: Any, parts: Parts) -> int:
    n_vocab = parts.model.memory_spec.vocab_size
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[0, :n_vocab])
    return int(rng.choice(allowed.tolist()))


def _row(name: str, reads: list[float], fills: list[float], needs: str) -> dict[str, Any]:
    def of(samples: list[float], share: float) -> float:
        return float(np.quantile(samples, share))

    return {
        "library": name, "read a schema, ms": 1e3 * of(reads, 0.5), "99 %, ms": 1e3 * of(reads, 0.99),
        "a mask, us": 1e6 * of(fills, 0.5), "99 %, us": 1e6 * of(fills, 0.99), "installs": needs,
    }  # fmt: skip
