"""Measures real files beside llama.cpp, in parts that can be run one by one."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import Report
from benchmarks.real import big_file, drafting, perplexity, serving, texts
from hybridmem.chat.prompts import load_tokenizer
from tests.real.download import BOOK as _BOOK
from tests.real.download import FOLDER, GEMMA_3, SMOLLM_2

FILES, BOOK = (FOLDER / SMOLLM_2, FOLDER / GEMMA_3), FOLDER / _BOOK
VOCABULARY = FOLDER / "vocabularies" / "qwen35.gguf"
PARTS = ("serving", "texts", "perplexity", "rows", "drafts", "large")
_N_TOKENS = 20_000


def real(*, quick: bool, programs: Path, files: list[Path], book: Path, parts: list[str], kept: Path | None) -> Report:
    """Measure each file. Tables of parts that are not run now are taken from the earlier report in `kept`.

    Args:
        programs: the folder of llama-server and llama-perplexity.
        book: a text file; the first 20,000 tokens are read.
    """
    report = Report("real", notes=[serving.NOTE, texts.NOTE, perplexity.NOTE, drafting.NOTE, big_file.NOTE])
    whole = book.read_text()
    for path in files:
        tokenizer = load_tokenizer(path)
        ids = tokenizer.encode(whole, add_special_tokens=False)[: _N_TOKENS // (10 if quick else 1)]
        first = tokenizer.encode("")  # An empty text gives the token that begins texts, if the model has one.
        if "serving" in parts:
            serving.compare(report, programs, path, whole, 1 if quick else 5)
        if "texts" in parts:
            texts.agree(report, programs, path, ids, first, 5 if quick else 50)
        if "perplexity" in parts:
            perplexity.against_llamacpp(report, programs, path, ids, first, whole)
        if "rows" in parts:
            perplexity.by_rows(report, path, ids, first)
        if "drafts" in parts:
            drafting.compare(report, path, tokenizer, whole, 1 if quick else 5)
    if "large" in parts:
        big_file.measure(report, programs, VOCABULARY, quick=quick)
    report.keep_tables(kept)
    return report
